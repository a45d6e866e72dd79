"""Figures of an ablation as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import Plot, axis_name, run_line, scaled, slant
from befit.report.numbers import plain
from befit.report.svg import MUTED, draw, run_ink

_WIDTH = 12.0


def draw_figure(figure: Figure, number: int, results: Mapping[str, Any]) -> Plot:
    """One figure, for a page on which it is the `number`-th. `results` says the metric."""
    columns = min(figure.columns, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)

    def paint(canvas: Canvas) -> None:
        grid = canvas.subplots(rows, columns, squeeze=False, sharey=figure.share_y)
        places = [axes for row in grid for axes in row]
        for place, (axes, panel) in enumerate(zip(places, figure.panels, strict=False)):
            _paint(axes, panel, results)
            if figure.share_y and place % columns:
                axes.set_ylabel("")
            if panel.title and len(figure.panels) > 6 and place < len(figure.panels) - columns:
                axes.set_xlabel("")  # one below each column is enough
        for axes in places[len(figure.panels) :]:
            axes.set_axis_off()
        _legend(canvas, places[: len(figure.panels)])

    return Plot(
        figure.title,
        draw(f"ablation-{number}", figure.title, _WIDTH, figure.height * rows + 0.4, paint),
        figure.note,
        wide=True,
    )


def _paint(axes: Axes, panel: Panel, results: Mapping[str, Any]) -> None:
    def heights(values: Sequence[float]) -> list[float]:
        return scaled(values, results) if panel.score else list(values)

    for line in panel.lines:
        if line.low:
            axes.fill_between(
                line.x, heights(line.low), heights(line.high), color=run_ink(line.ink), alpha=0.15, linewidth=0
            )
        if line.thin:
            axes.plot(line.x, heights(line.y), color=run_ink(line.ink), linewidth=0.8, alpha=0.45)
        else:
            axes.plot(
                line.x,
                heights(line.y),
                **run_line(line.ink),
                label=line.label,
                marker="o" if line.marker else None,
                markersize=3.5,
            )
    for point in panel.points:
        (y,) = heights([point.y])
        ink = run_ink(point.ink)
        axes.plot(
            [point.x],
            [y],
            linestyle="none",
            marker=point.shape,
            markersize=7,
            color=ink,
            label=point.label,
            markerfacecolor="none" if point.shape == "s" else ink,
            zorder=4,
        )
        if point.drop:
            axes.axvline(point.x, color=run_ink(point.ink), linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    if panel.bars:
        _bars(axes, panel, heights)
    places = sorted({place for line in panel.lines for place in line.x})
    if panel.log:
        axes.set_xscale("log")
        axes.set_xticks(places, [_power(place) for place in places])  # matplotlib's own labels are formulas
        axes.minorticks_off()
    elif len(places) > 1 and all(place == int(place) for place in places) and places[-1] > 1:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(plain(panel.title))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y or (axis_name(results) if panel.score else ""))


def _bars(axes: Axes, panel: Panel, heights: Any) -> None:
    width = 0.8 / len(panel.bars)
    for slot, bars in enumerate(panel.bars):
        places = [group + (slot - (len(panel.bars) - 1) / 2) * width for group in range(len(panel.groups))]
        values = heights(bars.heights)
        axes.bar(places, values, width * 0.92, color=run_ink(bars.ink), label=bars.label)
        if bars.errors:
            axes.errorbar(places, values, heights(bars.errors), fmt="none", ecolor=MUTED, elinewidth=1.2, capsize=3)
    names = [plain(name) for name in panel.groups]
    axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.02)
    if len(names) * max(map(len, names), default=0) > 110:
        slant(axes, 40)
    if panel.fits:
        _fit(axes, panel.bars, heights)


def _fit(axes: Axes, bars: Sequence[Bars], heights: Any) -> None:
    """Begin the axis where differences can be seen; the note of such a figure says that it does not begin at zero."""
    reach = [
        (value, error)
        for group in bars
        for value, error in zip(
            heights(group.heights), heights(group.errors or [0.0] * len(group.heights)), strict=True
        )
        if math.isfinite(value)
    ]
    if not reach:
        return
    low, high = min(value - error for value, error in reach), max(value + error for value, error in reach)
    room = max(high - low, 1e-3 * abs(high), 1e-12)
    axes.set_ylim(max(0.0, low - 0.6 * room) if low >= 0 else low - 0.6 * room, high + 0.25 * room)


def _power(value: float) -> str:
    """A tick of a logarithmic axis, short.

    >>> _power(1e-06), _power(0.01), _power(30.0)
    ('1e-6', '0.01', '30')
    """
    return f"{value:g}".replace("e-0", "e-")


def _legend(canvas: Canvas, places: Sequence[Axes]) -> None:
    """Every label once, above all panels."""
    handles: dict[str, Any] = {}
    for axes in places:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1:
        canvas.legend(
            list(handles.values()), list(handles), loc="outside upper left", ncols=5, fontsize=9, handlelength=2.2
        )
