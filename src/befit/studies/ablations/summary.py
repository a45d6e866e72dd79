"""Means over clients, and their spread over seeds: clients of one seed share a model, seeds share nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from befit.core import metrics
from befit.report import table
from befit.report.ablation_figures import Bars, Line
from befit.report.numbers import NOTHING, decimal_text
from befit.report.table import Cell
from befit.studies.ablations.base import Row

__all__ = ["Spread", "clients_of", "curve", "difference", "mean_bars", "seeds_of", "spread", "thin_lines", "times"]


@dataclass(frozen=True)
class Spread:
    """The mean over seeds of the means over clients, and its standard deviation; None with one seed."""

    mean: float
    deviation: float | None

    def score(self, metric: str) -> str:
        return str(Cell(self.mean, table.score(metric), self.deviation))

    def gain(self, metric: str) -> str:
        return str(Cell(self.mean, table.difference(metric), self.deviation))

    def number(self, digits: int = 2) -> str:
        return str(Cell(self.mean, table.decimals(digits), self.deviation))


def spread(rows: Iterable[Row], value: str | Callable[[Row], float | None]) -> Spread | None:
    """Of a column, or of what a function makes of a row; rows in which it is None do not count. None without any."""
    take = (lambda row: row[value]) if isinstance(value, str) else value
    by_seed: dict[Any, list[float]] = {}
    for row in rows:
        if (number := take(row)) is not None:
            by_seed.setdefault(row["seed"], []).append(float(number))
    over = metrics.spread([statistics.fmean(values) for values in by_seed.values()])
    return None if over is None else Spread(over["mean"], over["sd"])


def difference(rows: Iterable[Row], column: str, other: str) -> Spread | None:
    """Mean of `column - other`, paired at each client; rows without one of them do not count."""

    def gap(row: Row) -> float | None:
        mine, theirs = row[column], row[other]
        return None if mine is None or theirs is None else float(mine) - float(theirs)

    return spread(rows, gap)


def curve(label: str, rows: Sequence[Row], x: str, y: str, ink: int = 0) -> Line:
    """The mean of y at every x, with a band of one standard deviation over seeds."""
    places = sorted({float(row[x]) for row in rows if row[x] is not None and row[y] is not None})
    found = [spread([row for row in rows if row[x] is not None and float(row[x]) == place], y) for place in places]
    means = [one.mean if one else math.nan for one in found]
    if any(one is None or one.deviation is None for one in found):
        return Line(label, places, means, ink=ink)
    deviations = [one.deviation or 0.0 for one in found if one]
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    return Line(label, places, means, low, high, ink)


def thin_lines(rows: Sequence[Row], x: str, y: str, ink: int = 1) -> list[Line]:
    """One thin curve for each client of each seed."""
    lines = []
    for seed in seeds_of(rows):
        for client in clients_of(rows, seed):
            mine = [row for row in rows if row["seed"] == seed and row["client"] == client and row[y] is not None]
            places = sorted((float(row[x] or 0), float(row[y] or 0)) for row in mine)
            if places:
                lines.append(Line("", [at for at, _ in places], [value for _, value in places], ink=ink, thin=True))
    return lines


def mean_bars(label: str, groups: Sequence[Sequence[Row]], value: str, ink: int = 0) -> Bars:
    """The mean of a column in each group of rows, with a whisker of one standard deviation over seeds."""
    found = [spread(rows, value) for rows in groups]
    heights = [one.mean if one else math.nan for one in found]
    errors = [one.deviation or 0.0 if one else 0.0 for one in found]
    return Bars(label, heights, errors if any(errors) else (), ink)


def seeds_of(rows: Sequence[Row]) -> list[Any]:
    return list(dict.fromkeys(row["seed"] for row in rows))


def clients_of(rows: Sequence[Row], seed: Any) -> list[str]:
    return list(dict.fromkeys(str(row["client"]) for row in rows if row["seed"] == seed))


def times(ratio: float | None) -> str:
    """How many times as much.

    >>> times(3.26), times(None)
    ('3.3 times', '–')
    """
    return NOTHING if ratio is None else f"{decimal_text(round(ratio, 1))} times"
