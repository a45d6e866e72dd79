"""Means over clients, and their spread over seeds: clients of one seed share a model, seeds share nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from befit.core.metrics import spread
from befit.report.ablation_figures import Bars, Line
from befit.report.table import PLAIN, Cell, Unit, difference
from befit.studies.ablations.base import Row


def over_seeds(rows: Iterable[Row], value: str | Callable[[Row], float | None], unit: Unit = PLAIN) -> Cell:
    """The mean over seeds of the means over clients, with its standard deviation where there are several seeds.

    Of a column, or of what a function makes of a row; rows in which it is None do not count.
    """
    by_seed: dict[Any, list[float]] = {}
    for row in rows:
        if (number := row[value] if isinstance(value, str) else value(row)) is not None:
            by_seed.setdefault(row["seed"], []).append(float(number))
    over = spread([statistics.fmean(values) for values in by_seed.values()])
    return Cell(None) if over is None else Cell(over["mean"], unit, over["sd"])


def gain(rows: Iterable[Row], column: str, other: str, metric: str) -> Cell:
    """Mean of `column - other`, paired at each client; rows without one of them do not count."""
    return over_seeds(
        rows, lambda row: None if None in (row[column], row[other]) else row[column] - row[other], difference(metric)
    )


def curve(label: str, rows: Sequence[Row], x: str, y: str, ink: int = 0) -> Line:
    """The mean of y at every x, with a band of one standard deviation over seeds."""
    places = sorted({float(row[x]) for row in rows if row[x] is not None and row[y] is not None})
    cells = [over_seeds([row for row in rows if row[x] is not None and float(row[x]) == place], y) for place in places]
    means, deviations = [number(cell) for cell in cells], [cell.spread for cell in cells]
    if None in deviations:
        return Line(label, places, means, ink=ink)
    low = [mean - (deviation or 0) for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + (deviation or 0) for mean, deviation in zip(means, deviations, strict=True)]
    return Line(label, places, means, low, high, ink)


def number(cell: Cell) -> float:
    """A cell's number; NaN where it has none."""
    return cell.value if isinstance(cell.value, float) else math.nan


def thin_lines(rows: Sequence[Row], x: str, y: str) -> list[Line]:
    """One thin curve for each client of each seed."""
    lines = []
    for seed in seeds_of(rows):
        for client in clients_of(rows, seed):
            of_client = [row for row in rows if row["seed"] == seed and row["client"] == client and row[y] is not None]
            places = sorted((float(row[x] or 0), float(row[y] or 0)) for row in of_client)
            if places:
                lines.append(Line("", [at for at, _ in places], [value for _, value in places], ink=1, thin=True))
    return lines


def mean_bars(label: str, groups: Sequence[Sequence[Row]], value: str, ink: int) -> Bars:
    """The mean of a column in each group of rows, with a whisker of one standard deviation over seeds."""
    cells = [over_seeds(rows, value) for rows in groups]
    errors = [cell.spread or 0.0 for cell in cells]
    return Bars(label, [number(cell) for cell in cells], errors if any(errors) else (), ink)


def seeds_of(rows: Sequence[Row]) -> list[Any]:
    return list(dict.fromkeys(row["seed"] for row in rows))


def clients_of(rows: Sequence[Row], seed: Any) -> list[str]:
    return list(dict.fromkeys(str(row["client"]) for row in rows if row["seed"] == seed))
