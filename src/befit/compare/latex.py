"""compare.tex: the tables of a comparison for a paper, with booktabs and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from befit.compare.summary import limit_of, verdict
from befit.compare.tables import clients_of
from befit.limit import limit_sentence
from befit.report.numbers import NOTHING, bytes_text, is_share, plain, score_text

__all__ = ["escape_latex", "render_latex"]

_ESCAPES = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#",
            "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\N{EN DASH}": "--",
            "\N{MINUS SIGN}": "$-$", "±": r"$\pm$",
            "·": r"$\cdot$", "<": "$<$", ">": "$>$"}  # fmt: skip


def escape_latex(text: str) -> str:
    """
    >>> print(escape_latex("A & B_1: 50% · x"))
    A \\& B\\_1: 50\\% $\\cdot$ x
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in plain(text))


def render_latex(results: Mapping[str, Any]) -> str:
    """All grids, the table of all runs, and the clients. Shares are in percent, as in the other files."""
    limit = limit_sentence(limit_of(results))
    parts = [
        f"% {plain(results['title'])}",
        *([] if limit is None else [f"% {limit}"]),
        r"% needs \usepackage{booktabs}",
    ]
    parts += [_grid(results, grid) for grid in results["tables"]]
    parts += [_runs(results), _clients(results)]
    return "\n\n".join(parts) + "\n"


def _grid(results: Mapping[str, Any], grid: Mapping[str, Any]) -> str:
    """Rows and columns as in the recipe; the outer labels of columns span the inner ones. Best of all cells in bold."""
    by_label = {run["label"]: run for run in results["runs"]}
    best = _best([by_label[label] for row in grid["runs"] for label in row if label])
    depth = max((len(one) for one in grid["columns"]), default=1)
    lines = [_spanning(grid, level) for level in range(depth - 1)]
    lines.append(_line([grid["corner"], *(one[-1] if one else "" for one in grid["columns"])]))
    body = []
    for i, row in enumerate(grid["rows"]):
        cells = [escape_latex(", ".join(row))]
        for j in range(len(grid["columns"])):
            label, paper = grid["runs"][i][j], grid["paper"][i][j]
            text = "--" if label is None else _spread(by_label[label]["mean"], results["metric"], label in best)
            cells.append(text if paper is None else f"{text} [{paper:.2f}]")
        body.append(" & ".join(cells) + r" \\")
    caption = f"{escape_latex(grid['title'])}. {_unit(results)}, {_seeds(results)}, best in bold"
    if any(number is not None for row in grid["paper"] for number in row):
        caption += f"; in brackets: {escape_latex(results['paper'] or 'the paper')}"
    return _table("l" + "c" * len(grid["columns"]), lines, body, caption, grid["name"])


def _spanning(grid: Mapping[str, Any], level: int) -> str:
    """One line of outer labels of columns, each over all columns that share it and those above it."""
    cells, rules, at = [""], [], 2
    for _, group in itertools.groupby(grid["columns"], key=lambda one: one[: level + 1]):
        members = list(group)
        cells.append(rf"\multicolumn{{{len(members)}}}{{c}}{{{escape_latex(members[0][level])}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + len(members) - 1}}}")
        at += len(members)
    return " & ".join(cells) + r" \\" + "\n" + " ".join(rules)


def _runs(results: Mapping[str, Any]) -> str:
    """Every run: mean, worst client, clients better than the reference, bytes, and the paper's number."""
    metric, reference, runs = results["metric"], results["reference"], results["runs"]
    best = _best(runs)
    papers = any(run["paper"] is not None for run in runs)
    headers = ["", "mean", "worst client", f"better than {reference}", "up", "down", *["paper"] * papers]
    body = []
    for run in runs:
        signed = (run["against"] or {}).get("signed")
        marked = verdict(run["against"]) in ("better", "worse") if run["label"] != reference else False
        cells = [
            escape_latex(run["label"]),
            _spread(run["mean"], metric, run["label"] in best) + (r"$^{\ast}$" if marked else ""),
            _spread(run["worst"], metric, False),
            f"{signed['better']}/{signed['n']}" if signed else "--",
            escape_latex(bytes_text(run["bytes_up"])),
            escape_latex(bytes_text(run["bytes_down"])),
            *["--" if run["paper"] is None else f"{run['paper']:.2f}"] * papers,
        ]
        body.append(" & ".join(cells) + r" \\")
    caption = (
        f"{_unit(results)}, {_seeds(results)}, of the mean over clients, best in bold. $^{{\\ast}}$: differs "
        f"from {escape_latex(reference)} (paired $t$ test over seeds, $p < 0.05$ after Holm's correction)"
    )
    return _table("l" + "r" * (len(headers) - 1), [_line(headers)], body, caption, "runs")


def _clients(results: Mapping[str, Any]) -> str:
    body = [" & ".join([escape_latex(client), *(_spread(run["clients"].get(client), results["metric"], False)
                                                for run in results["runs"])]) + r" \\"
            for client in clients_of(results)]  # fmt: skip
    headers = ["client", *(run["label"] for run in results["runs"])]
    caption = f"{_unit(results)} of every client, {_seeds(results)}"
    return _table("l" + "r" * len(results["runs"]), [_line(headers)], body, caption, "clients")


def _table(columns: str, headers: Sequence[str], body: Sequence[str], caption: str, name: str) -> str:
    return "\n".join([r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *headers,
                      r"\midrule", *body, r"\bottomrule", r"\end{tabular}", rf"\caption{{{_capped(caption)}.}}",
                      rf"\label{{tab:{name}}}", r"\end{table}"])  # fmt: skip


def _capped(caption: str) -> str:
    return caption.rstrip(".")


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def _unit(results: Mapping[str, Any]) -> str:
    name = escape_latex(results["metric"].replace("_", " "))
    return name[:1].upper() + name[1:] + (r" (\%)" if is_share(results["metric"]) else "")


def _seeds(results: Mapping[str, Any]) -> str:
    count = len(results["seeds"])
    part = ", of a trial on part of the whole that means nothing" if limit_of(results) else ""
    return (rf"mean $\pm$ SD over {count} seeds" if count > 1 else "one seed") + part


def _best(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Labels of the run with the highest mean, or of several."""
    known = [run for run in runs if run["mean"]]
    highest = max((run["mean"]["mean"] for run in known), default=0.0)
    return {run["label"] for run in known if run["mean"]["mean"] == highest}


def _spread(value: Mapping[str, Any] | None, metric: str, bold: bool) -> str:
    """A mean with its SD, shares in percent without the sign."""
    if value is None:
        return "--"
    mean = score_text(value["mean"], metric).rstrip("%").replace(NOTHING, "--")
    text = rf"\textbf{{{mean}}}" if bold else mean
    if value["sd"] is None:
        return text
    sd = f"{100 * value['sd']:.1f}" if is_share(metric) else f"{value['sd']:.2g}"
    return rf"{text} $\pm$ {sd}"
