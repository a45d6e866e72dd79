"""A heat map of numbers, as shapes that a page may hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from befit.report.numbers import MINUS

Grid = np.ndarray[Any, np.dtype[np.float64]]
MARKED = 400  # cells that still have room for their number


def heat(axes: Axes, grid: Grid, marked: bool, figure: Figure, colours: str = "Blues") -> None:
    """One map with its own scale, in blues from zero or in other colours from its least; numbers in the cells where
    there is room for them."""
    finite = grid[np.isfinite(grid)]
    low = 0.0 if colours == "Blues" or not finite.size else float(finite.min())
    high = float(finite.max()) if finite.size and finite.max() > low else low + 1
    # Cells as shapes: the page lets no pictures in, not even those that an SVG has inside.
    rows, columns = (np.arange(size + 1) - 0.5 for size in grid.shape)
    # White lines between large cells; small ones have edges of their own colour, or the paper shines through the seams.
    edge, width = ("white", 0.8) if grid.size <= MARKED else ("face", 0.2)
    image = axes.pcolormesh(
        columns, rows, np.ma.masked_invalid(grid), cmap=colours, vmin=low, vmax=high, edgecolors=edge, linewidth=width
    )
    axes.invert_yaxis()
    axes.grid(False)
    for (row, column), value in np.ndenumerate(grid) if marked else ():
        if np.isfinite(value) and (value or colours != "Blues"):
            share = (value - low) / (high - low)
            dark = share > 0.55 if colours == "Blues" else share < 0.55
            text = f"{value:.2f}" if colours != "Blues" and 0.1 <= high < 10 else _number(float(value))
            axes.text(
                column,
                row,
                text.replace("-", MINUS),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "#123",
            )
    whole = bool((finite == finite.round()).all())  # ranks of single clients
    bar = figure.colorbar(image, ax=axes, shrink=0.85, ticks=MaxNLocator(nbins=8, integer=whole))
    assert bar.solids is not None
    bar.solids.set_rasterized(False)
    bar.solids.set_edgecolor("face")
    bar.ax.tick_params(labelsize=8)


def _number(value: float) -> str:
    """Two digits, and whole numbers as such: cells are small.

    >>> _number(12.62), _number(0.0312), _number(3.0), _number(4.26)
    ('13', '0.031', '3', '4.3')
    """
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"
