"""Fast adaptation as a table, a picture, a page or a file of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from befit.core.text import first_of
from befit.report.comparison import run_title
from befit.report.drawing import axis_name, legend, run_line, scaled
from befit.report.numbers import count_text, plain
from befit.report.page import small_page
from befit.report.svg import RUN_COLOURS, draw, png
from befit.report.table import Cell, Table, csv_text, html, score
from befit.studies.adapt import STARTS, Adapted

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def adaptation_table(rows: Sequence[Mapping[str, Any]], metric: str) -> Table:
    """Means over newcomers: a row for each run, method and start, a column for each step, and the curve's mean."""
    shown = [row for row in rows if "scores" in row]
    steps = list(shown[0]["scores"]) if shown else []
    headers = ["start", "newcomers", *(f"step {step}" for step in steps), "mean of the curve"]
    cells = [
        [name, row["newcomers"], *(Cell(value, score(metric)) for value in [*row["scores"].values(), row["mean"]])]
        for name, row in zip(_names(shown), shown, strict=True)
    ]
    return Table(f"Mean {metric.replace('_', ' ')} over newcomers", headers, cells)


def missing_starts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each start that some newcomer lacks, with the reason."""
    sentences = []
    for name, row in zip(_names(rows), rows, strict=True):
        if reasons := row["reasons"]:
            reason = plain(next(iter(reasons.values()))).rstrip(".")
            sentences.append(f"{name}: none for {first_of(reasons, 3)}: {reason}.")
    return sentences


def adaptation_csv(results: Sequence[Adapted]) -> str:
    """A row for each newcomer, start, step and metric."""
    keys = ("run", "method", "start", "newcomer")
    return csv_text(
        {**{key: getattr(result, key) for key in keys}, "step": step, "metric": metric, "value": float(value)}
        for result in results
        if result.curve is not None
        for step, metrics in zip(result.curve.steps, result.curve.metrics, strict=True)
        for metric, value in metrics.items()
    )


def adaptation_png(rows: Sequence[Mapping[str, Any]], metric: str) -> bytes:
    """The mean score by steps from each start, as a picture."""
    return png(6.4, 3.9, lambda figure: _paint(figure, rows, metric, _COLOURS))


def adaptation_page(rows: Sequence[Mapping[str, Any]], metric: str, newcomers: int) -> str:
    """HTML with the curves, the table, and what the starts are."""
    picture = draw("adaptation", "scores by steps of training", 6.4, 3.9, lambda figure: _paint(figure, rows, metric))
    used = {row["start"] for row in rows}
    sentences = [f"{start}: {what}." for start, what in STARTS.items() if start in used] + missing_starts(rows)
    facts = f"Mean {plain(metric).replace('_', ' ')} over {count_text(newcomers, 'newcomer')}, each with its own data."
    below = [f"<p>{escape(sentence)}</p>" for sentence in sentences]
    above = f"<p>{escape(facts)}</p><figure>{picture}</figure>"
    return small_page("Fast adaptation", above, html(adaptation_table(rows, metric)), *below)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the rows: the start, with method and run where there are several."""
    runs, methods = ({row[key] for row in rows} for key in ("run", "method"))
    names = []
    for row in rows:
        parts = [Path(row["run"]).name] * (len(runs) > 1)
        parts += [run_title(row["method"])] * (len(methods) > 1)
        names.append(" · ".join(plain(part) for part in (*parts, row["start"])))
    return names


def _paint(figure: Figure, rows: Sequence[Mapping[str, Any]], metric: str, colours: Sequence[str] = ()) -> None:
    axes, shown, results = figure.add_subplot(), [row for row in rows if "scores" in row], {"metric": metric}
    for index, (name, row) in enumerate(zip(_names(shown), shown, strict=True)):
        line = run_line(index)
        if colours:
            line["color"] = colours[index % RUN_COLOURS]
        axes.plot(
            list(row["scores"]), scaled(row["scores"].values(), results), label=name, marker="o", markersize=3, **line
        )
    if shown:
        axes.set_xticks(list(shown[0]["scores"]))
    axes.set_xlabel("steps of training")
    axes.set_ylabel(axis_name(results))
    legend(figure, axes, len(shown))
