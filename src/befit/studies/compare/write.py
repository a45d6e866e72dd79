"""Writes a comparison's files: compare.json, .csv, .md, .tex, and a self-contained .html with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from befit.core.storage import atomic_write, write_json
from befit.core.yamlfile import write_yaml
from befit.data.limit import limit_sentence
from befit.report.markdown import section_lines
from befit.report.numbers import count_text, plain, ranges_text
from befit.report.page import environment
from befit.report.results import split_name
from befit.report.table import Table, csv_text, escape_markdown, latex
from befit.studies.compare.collect import FinishedRun, Scores, collect
from befit.studies.compare.execute import CellFailure
from befit.studies.compare.kept import KeptCell, write_kept
from befit.studies.compare.other_metrics import client_scores
from befit.studies.compare.plan import Plan
from befit.studies.compare.plots import plots_of
from befit.studies.compare.results import Comparison
from befit.studies.compare.summary import limit_of, summarise
from befit.studies.compare.tables import all_tables, failure_table
from befit.studies.compare.wins_tables import win_rows


def write_comparison(
    path: Path,
    plan: Plan,
    failures: Sequence[CellFailure],
    kept: Mapping[str, Scores],
    earlier: Mapping[str, KeptCell],
) -> Comparison | None:
    """Read all finished cells and write all six files, each whole or not at all; what compare.json holds.

    `kept` are the numbers of cells that were finished elsewhere, by key, and `earlier` the cells that the directory's
    cells.jsonl has so far, which stay in it. A seventh file, compare-wins.csv, where groups of clients are compared.
    None, and no files, where no cell is finished.
    Raises RunError for a directory that cannot be written.
    """
    failed = {(failure.label, failure.seed) for failure in failures}  # also those that are there, of other data
    runs = [
        FinishedRun(run, tuple(cell for cell in collect(path, run, kept).cells if (run.label, cell.seed) not in failed))
        for run in plan.runs
    ]
    if not any(run.cells for run in runs):
        return None
    results = summarise(plan, runs, failures)
    tables = all_tables(results)
    write_kept(path, runs, earlier)
    write_json(path / "compare.json", dict(results))
    atomic_write(path / "compare.csv", csv_text(client_rows(results)).encode())
    if results["wins"]:
        atomic_write(path / "compare-wins.csv", csv_text(win_rows(results)).encode())
    else:
        (path / "compare-wins.csv").unlink(missing_ok=True)  # of an earlier comparison
    atomic_write(path / "compare.md", render_markdown(results, tables).encode())
    atomic_write(path / "compare.tex", render_latex(results, tables).encode())
    atomic_write(path / "compare.html", render_page(results, tables).encode())
    return results


def client_rows(results: Comparison) -> list[dict[str, Any]]:
    """One row for every run, seed and client: the headline, its mean over the scored rounds where there were several,
    and metrics beside it at last."""
    others = client_scores(results)
    scored_often = any(cell["auc"] not in ({}, cell["clients"]) for run in results["runs"] for cell in run["seeds"])
    return [
        {
            "run": run["label"],
            "method": run["method"],
            "seed": cell["seed"],
            "client": client,
            results["metric"]: value,
            **({f"{results['metric']}_auc": cell["auc"].get(client)} if scored_often else {}),
            "examples": cell["examples"][client],
            "folder": cell["folder"],
            **others.get((run["label"], cell["seed"]), {}).get(client, {}),
        }
        for run in results["runs"]
        for cell in run["seeds"]
        for client, value in cell["clients"].items()
    ]


def render_markdown(results: Comparison, tables: Sequence[Table]) -> str:
    lead, *rest = map(escape_markdown, map(plain, results["sentences"]))
    facts = "\n".join(f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in _facts(results))
    about = escape_markdown(plain(results["about"]))
    parts = [f"# {escape_markdown(plain(results['title']))}", f"**{lead}**", " ".join(rest), about, facts]
    for table in [*tables, failure_table(results)]:
        parts += section_lines(table)
    return "\n\n".join(part for part in parts if part) + "\n"


def render_latex(results: Comparison, tables: Sequence[Table]) -> str:
    """All tables for a paper, which needs booktabs and nothing else."""
    limit = limit_sentence(limit_of(results))
    head = [f"% {plain(results['title'])}", *([f"% {limit}"] if limit else []), r"% needs \usepackage{booktabs}"]
    return "\n\n".join([*head, *map(latex, tables)]) + "\n"


def render_page(results: Comparison, tables: Sequence[Table]) -> str:
    """The page. Everything from outside is escaped by the template engine; only the SVG is not, whose serialiser has
    escaped the names inside."""
    first, *rest = map(plain, results["sentences"])
    return (
        environment()
        .get_template("compare.html.j2")
        .render(
            title=plain(results["title"]),
            name=plain(results["name"]),
            lead=first,
            sentences=rest,
            about=plain(results["about"]),
            plots=[(plot.title, Markup(plot.svg), plot.note, plot.wide) for plot in plots_of(results)],
            tables=[replace(table, detail=False) for table in sorted(tables, key=lambda table: table.detail)],
            failures=failure_table(results),
            facts=_facts(results),
            grouped=bool(results["wins"]),
            configs=[
                (plain(run["label"]), "\n".join(map(plain, write_yaml(run["config"]).splitlines())))
                for run in results["runs"]
            ],
        )
    )


def _facts(results: Comparison) -> list[tuple[str, str]]:
    cells = [cell for run in results["runs"] for cell in run["seeds"]]
    clients = {client for cell in cells for client in cell["clients"]}
    facts = [
        (
            "runs",
            f"{len(results['runs'])}, {count_text(len(cells), 'cell')} with "
            f"{count_text(len(results['seeds']), 'seed')} ({ranges_text(results['seeds'])})",
        ),
        ("clients", str(len(clients))),
        ("scores", f"{results['metric']} on {split_name(results)} examples; higher is better"),
        ("compared with", plain(results["reference"])),
    ]
    if results["paper"]:
        facts.append(("paper", plain(f"{results['paper']}{', ' + results['table'] if results['table'] else ''}")))
    return facts
