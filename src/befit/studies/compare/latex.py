"""compare.tex: the tables of a comparison for a paper, with booktabs and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from befit.data.limit import limit_sentence
from befit.report.numbers import bytes_text, is_share, plain
from befit.studies.compare.beside import beside_tables
from befit.studies.compare.latex_parts import escape_latex, latex_line, latex_spread, latex_table, seeds_text, unit_text
from befit.studies.compare.summary import limit_of, verdict
from befit.studies.compare.tables import clients_of
from befit.studies.compare.wins_latex import latex_wins

__all__ = ["escape_latex", "render_latex"]


def render_latex(results: Mapping[str, Any]) -> str:
    """All grids, wins, the table of all runs, what was measured beside it, and the clients. Shares are in percent."""
    limit = limit_sentence(limit_of(results))
    parts = [
        f"% {plain(results['title'])}",
        *([] if limit is None else [f"% {limit}"]),
        r"% needs \usepackage{booktabs}",
    ]
    parts += [_grid(results, grid) for grid in results["tables"]]
    parts += [*latex_wins(results), _runs(results), *_others(results), *_beside(results), _clients(results)]
    return "\n\n".join(parts) + "\n"


def _grid(results: Mapping[str, Any], grid: Mapping[str, Any]) -> str:
    """Rows and columns as in the study; the outer labels of columns span the inner ones. Best of all cells in bold."""
    by_label = {run["label"]: run for run in results["runs"]}
    best = _best([by_label[label] for row in grid["runs"] for label in row if label])
    depth = max((len(one) for one in grid["columns"]), default=1)
    lines = [_spanning(grid, level) for level in range(depth - 1)]
    lines.append(latex_line([grid["corner"], *(one[-1] if one else "" for one in grid["columns"])]))
    body = []
    for i, row in enumerate(grid["rows"]):
        cells = [escape_latex(", ".join(row))]
        for j in range(len(grid["columns"])):
            label, paper = grid["runs"][i][j], grid["paper"][i][j]
            text = "--" if label is None else latex_spread(by_label[label]["mean"], results["metric"], label in best)
            cells.append(text if paper is None else f"{text} [{paper:.2f}]")
        body.append(" & ".join(cells) + r" \\")
    caption = f"{escape_latex(grid['title'])}. {unit_text(results)}, {seeds_text(results)}, best in bold"
    if any(number is not None for row in grid["paper"] for number in row):
        caption += f"; in brackets: {escape_latex(results['paper'] or 'the paper')}"
    return latex_table("l" + "c" * len(grid["columns"]), lines, body, caption, grid["name"])


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
            latex_spread(run["mean"], metric, run["label"] in best) + (r"$^{\ast}$" if marked else ""),
            latex_spread(run["worst"], metric, False),
            f"{signed['better']}/{signed['n']}" if signed else "--",
            escape_latex(bytes_text(run["bytes_up"])),
            escape_latex(bytes_text(run["bytes_down"])),
            *["--" if run["paper"] is None else f"{run['paper']:.2f}"] * papers,
        ]
        body.append(" & ".join(cells) + r" \\")
    caption = (
        f"{unit_text(results)}, {seeds_text(results)}, of the mean over clients, best in bold. $^{{\\ast}}$: differs "
        f"from {escape_latex(reference)} (paired $t$ test over seeds, $p < 0.05$ after Holm's correction)"
    )
    return latex_table("l" + "r" * (len(headers) - 1), [latex_line(headers)], body, caption, "runs")


def _others(results: Mapping[str, Any]) -> list[str]:
    """Metrics beside the headline, where there are any; newcomers apart."""
    made = []
    for one in results["other_metrics"]:
        pool, metrics = one["pool"], one["metrics"]
        headers = ["", *(f"{name} (%)" if is_share(name) else name for name in metrics)]
        body = [
            " & ".join([escape_latex(label), *(latex_spread(run["scores"][name], name, False) for name in metrics)])
            + r" \\"
            for label, run in one["runs"].items()
        ]
        caption = f"Metrics beside {escape_latex(results['metric'])}, {seeds_text(results)}, of the mean over {pool}"
        name = "other-metrics" + "-newcomers" * (pool == "newcomers")
        made.append(latex_table("l" + "r" * len(metrics), [latex_line(headers)], body, caption, name))
    return made


def _beside(results: Mapping[str, Any]) -> list[str]:
    """Scores over time, on other clients' examples and of newcomers, where there are any."""
    made = []
    for one in beside_tables(results):
        headers, rows = one.titles, one.texts
        body = [latex_line(row) for row in rows]
        caption = f"{escape_latex(one.title)}: {unit_text(results)}, {seeds_text(results)}"
        name = one.title.split()[0].lower()
        made.append(latex_table("l" + "r" * (len(headers) - 1), [latex_line(headers)], body, caption, name))
    return made


def _clients(results: Mapping[str, Any]) -> str:
    body = [
        " & ".join(
            [
                escape_latex(client),
                *(latex_spread(run["clients"].get(client), results["metric"], False) for run in results["runs"]),
            ]
        )
        + r" \\"
        for client in clients_of(results)
    ]
    headers = ["client", *(run["label"] for run in results["runs"])]
    caption = f"{unit_text(results)} of every client, {seeds_text(results)}"
    return latex_table("l" + "r" * len(results["runs"]), [latex_line(headers)], body, caption, "clients")


def _best(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Labels of the run with the highest mean, or of several."""
    known = [run for run in runs if run["mean"]]
    highest = max((run["mean"]["mean"] for run in known), default=0.0)
    return {run["label"] for run in known if run["mean"]["mean"] == highest}
