"""Fast adaptation as a table, a picture, a page or a file of numbers."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from befit.report.comparison import run_title
from befit.report.drawing import axis_name, legend, run_line, scaled
from befit.report.numbers import count_text, plain
from befit.report.svg import RUN_COLOURS, draw
from befit.report.table import Cell, Table, score
from befit.report.table import html as table_html
from befit.studies.adapt import STARTS, Adapted

__all__ = ["adaptation_csv", "adaptation_page", "adaptation_png", "adaptation_table", "without"]

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


def without(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each start that some newcomer could not have."""
    found = []
    for name, row in zip(_names(rows), rows, strict=True):
        reasons = row["reasons"]
        if reasons:
            whom = ", ".join([*reasons][:3]) + (", …" if len(reasons) > 3 else "")
            found.append(f"{name}: none for {whom}: {plain(next(iter(reasons.values()))).rstrip('.')}.")
    return found


def adaptation_csv(found: Sequence[Adapted]) -> str:
    """A row for each newcomer, start, step and metric."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["run", "method", "start", "newcomer", "step", "metric", "value"])
    for one in found:
        for step, metrics in zip(one.curve.steps, one.curve.metrics, strict=True) if one.curve is not None else ():
            for metric, value in metrics.items():
                table.writerow([one.run, one.method, one.start, one.newcomer, step, metric, repr(float(value))])
    return text.getvalue()


def adaptation_png(rows: Sequence[Mapping[str, Any]], metric: str) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=(6.4, 3.9), layout="constrained", dpi=150)
        _paint(figure, rows, metric, _COLOURS)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def adaptation_page(rows: Sequence[Mapping[str, Any]], metric: str, newcomers: int) -> str:
    """HTML with the curves, the table, and what the starts are."""
    style = files("befit.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    title = "Fast adaptation"
    picture = draw("adaptation", "scores by steps of training", 6.4, 3.9, lambda figure: _paint(figure, rows, metric))
    used = {row["start"] for row in rows}
    said = [f"{start}: {what}." for start, what in STARTS.items() if start in used] + without(rows)
    facts = f"Mean {plain(metric).replace('_', ' ')} over {count_text(newcomers, 'newcomer')}, each with its own data."
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"</head><body><main><h1>{title}</h1><p>{html.escape(facts)}</p><figure>{picture}</figure>"
        f"{table_html(adaptation_table(rows, metric))}{''.join(f'<p>{html.escape(one)}</p>' for one in said)}"
        "</main></body></html>\n"
    )


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the rows: the start, with method and run where there are several."""
    runs, methods = ({row[key] for row in rows} for key in ("run", "method"))
    names = []
    for row in rows:
        parts = [Path(row["run"]).name] * (len(runs) > 1)
        parts += [run_title(row["method"])] * (len(methods) > 1)
        names.append(" · ".join(plain(one) for one in (*parts, row["start"])))
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
