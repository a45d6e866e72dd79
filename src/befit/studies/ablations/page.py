"""Writes an ablation's files: ablation.json, .csv, .md, and a self-contained .html with the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from befit.core.storage import atomic_write, write_json
from befit.core.yamlfile import write_yaml
from befit.report.ablation_figures import Figure
from befit.report.ablation_plots import draw_figure
from befit.report.comparison import run_title
from befit.report.markdown import section_lines
from befit.report.numbers import count_text, plain, ranges_text
from befit.report.page import environment
from befit.report.sections import environment_table
from befit.report.table import Table, csv_text, escape_markdown


def write_ablation(path: Path, results: Mapping[str, Any], tables: Sequence[Table], figures: Sequence[Figure]) -> None:
    """Write all four files, each whole or not at all. Raises RunError for a directory that cannot be written."""
    write_json(path / "ablation.json", dict(results))
    atomic_write(path / "ablation.csv", csv_text(results["rows"]).encode())
    atomic_write(path / "ablation.md", render_markdown(results, tables).encode())
    atomic_write(path / "ablation.html", render_page(results, tables, figures).encode())


def render_markdown(results: Mapping[str, Any], tables: Sequence[Table]) -> str:
    first, *rest = results["findings"]["sentences"]
    parts = [
        f"# {escape_markdown(plain(results['title']))}: {escape_markdown(plain(results['name']))}",
        f"**{escape_markdown(first)}**",
        escape_markdown(" ".join(rest)),
        "\n".join(f"- {escape_markdown(k)}: {escape_markdown(v)}" for k, v in _facts(results)),
    ]
    for table in tables:
        parts += section_lines(table)
    return "\n\n".join(part for part in parts if part) + "\n"


def render_page(results: Mapping[str, Any], tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """The page. Everything from outside is escaped by the template engine; only the SVG is not, whose serialiser has
    escaped the names inside."""
    plots = [draw_figure(figure, number, results) for number, figure in enumerate(figures)]
    first, *rest = results["findings"]["sentences"]
    return (
        environment()
        .get_template("ablation.html.j2")
        .render(
            title=plain(results["title"]),
            name=plain(results["name"]),
            method=run_title(results["method"]),
            lead=first,
            sentences=rest,
            plots=[(plot.title, Markup(plot.svg), plot.note) for plot in plots],
            tables=sorted(tables, key=lambda table: table.detail),
            facts=_facts(results),
            about=results["about"],
            environment=environment_table(results["environment"]),
            config="\n".join(map(plain, write_yaml(results["config"]).splitlines())),
        )
    )


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = results["rows"]
    clients = {(row["seed"], row["client"]) for row in rows}
    options = "; ".join(f"{name}: {_option(value)}" for name, value in results["options"].items())
    spread = "over seeds, of means over clients" if len(results["seeds"]) > 1 else "none: one seed only"
    return [
        ("ablation", results["ablation"]),
        ("what", results["summary"]),
        ("options", options or "none"),
        *([("run of the study", results["run"])] if results["run"] else []),
        (
            "data",
            f"{plain(results['data'])}, {count_text(len(clients), 'client')} in "
            f"{count_text(len(results['seeds']), 'seed')} ({ranges_text(results['seeds'])})",
        ),
        ("scores", f"{results['metric']} on {results['split']} examples; higher is better"),
        ("spread (±)", f"standard deviation {spread}" if len(results["seeds"]) > 1 else spread),
    ]


def _option(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option, value))
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
