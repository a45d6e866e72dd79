"""Clients against clients: each model on everybody's examples, and who learns from whom; and every client's gates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from befit.report.diagnostics import ON_OTHERS, Rows, declared, on_others, weights
from befit.report.drawing import MANY, Plot, scaled, short_name
from befit.report.heat import MARKED, Grid, heat
from befit.report.numbers import is_share
from befit.report.results import RunResults
from befit.report.svg import draw

_TICKS = 48  # names of columns that have room


def scores_on_others(results: RunResults) -> Plot | None:
    """Models down, whose examples they answer across."""
    unit = "in percent" if is_share(results["metric"]) else results["metric"].replace("_", " ")
    note = (
        f"{results['metric'].replace('_', ' ').capitalize()} ({unit}) of each client's model, in its row, on the test "
        "examples of each client, in the columns; the diagonal is everybody's own."
    )
    rows = {
        client: dict(zip(row, scaled(list(row.values()), results), strict=True))
        for client, row in on_others(results).items()
    }
    return client_map(ON_OTHERS, "on-others", note, rows, list(results["clients"]), "viridis")


def client_weights(results: RunResults) -> list[Plot]:
    """Who receives down, whose adapters count across."""
    plots = (
        client_map(shown["title"], "weights", shown["text"], weights(results), list(results["clients"]), "Blues")
        for shown in declared(results, "weights")
    )
    return [plot for plot in plots if plot is not None]


def gate_map(results: RunResults) -> Plot | None:
    """Clients down, layers across, of all families one after the other."""
    rows = {client: gates for client, row in results["clients"].items() if (gates := row.get("gates"))}
    names = list(dict.fromkeys(name for gates in rows.values() for name in gates))
    values = [value for gates in rows.values() for value in gates.values()]
    if not values:
        return None
    note = (
        f"What the gate of each layer gives to what a client received, the rest being its own: {min(values):.3f} to "
        f"{max(values):.3f}. It is known here because all clients are on one machine."
    )
    return client_map("Gates", "gates", note, rows, names, "viridis")


def client_map(title: str, name: str, note: str, rows: Rows, columns: Sequence[str], colours: str) -> Plot | None:
    """Nothing without rows, and for more of them than have room."""
    if not 1 < len(rows) <= MANY:
        return None
    grid: Grid = np.array([[row.get(column, math.nan) for column in columns] for row in rows.values()], dtype=float)
    labels = [short_name(column.removeprefix("block.")) for column in columns]
    step = -(-len(labels) // _TICKS)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        heat(axes, grid, grid.size <= MARKED, figure, colours)
        axes.set_yticks(range(len(rows)), [short_name(client) for client in rows], fontsize=8)
        axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=90, fontsize=7)

    height = 1.7 + max(0.8, 0.22 * len(rows))
    return Plot(title, draw(name, note, 9.4, height, paint), note, True)
