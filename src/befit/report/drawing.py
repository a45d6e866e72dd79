"""What all plots of a report share: their look, their units, and the order of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from befit.report.numbers import is_share, plain
from befit.report.svg import run_ink

MANY = 40  # beyond so many clients plots show distributions instead of single clients
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1.5, 2)))


@dataclass(frozen=True)
class Plot:
    """One picture: `wide` ones want the full width of the page."""

    title: str
    svg: str
    note: str
    wide: bool = False


LEGEND_INCHES = 0.8  # height of a legend for which a figure has room


def legend(figure: Figure, axes: Axes, runs: int) -> None:
    """Above the axes, in as many columns as the figure is wide enough for; none for a single run.

    A legend of many rows makes the figure taller, so that the axes keep their room.
    """
    if runs < 2:
        return
    handles, labels = axes.get_legend_handles_labels()
    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(4, 0, -1):
        drawn = figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9, handlelength=2.4)
        extent = drawn.get_window_extent(renderer)  # type: ignore[arg-type]
        if columns == 1 or extent.width <= 0.98 * figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + max(0.0, extent.height / figure.dpi - LEGEND_INCHES))
            return
        drawn.remove()


def run_line(index: int) -> dict[str, Any]:
    return {
        "color": run_ink(index),
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": 2.2 if index == 0 else 1.7,
    }


def scaled(values: Iterable[float], results: Mapping[str, Any]) -> list[float]:
    """Shares in percent, as on the axes."""
    return [100 * value if is_share(results["metric"]) else value for value in values]


def slant(axes: Axes, degrees: int) -> None:
    """Slant the names below an axis that would run into each other."""
    axes.tick_params(axis="x", labelrotation=degrees, labelsize=9)
    for text in axes.get_xticklabels():
        text.set_horizontalalignment("right")
        text.set_rotation_mode("anchor")


def metric_name(results: Mapping[str, Any]) -> str:
    return plain(results["metric"]).replace("_", " ")


def axis_name(results: Mapping[str, Any]) -> str:
    return metric_name(results) + (" (%)" if is_share(results["metric"]) else "")


def short_name(client: str) -> str:
    """A client's name as a tick label."""
    text = plain(client)
    return text if len(text) <= 14 else f"{text[:6]}…{text[-6:]}"
