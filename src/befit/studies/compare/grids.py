"""A grid: all combinations of some choices, and the place of each in a table of two dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from befit.core.errors import did_you_mean
from befit.studies.compare.cells import Collector
from befit.studies.compare.study import Axis, Grid, label_text

SEPARATOR = " · "  # between the labels of a grid's run


@dataclass(frozen=True)
class GridTable:
    """A table of two dimensions. Cells are (row, column); a cell has a run or a reason why there is none."""

    name: str
    title: str
    note: str
    corner: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[tuple[str, ...], ...]
    runs: Mapping[tuple[int, int], str]
    reasons: Mapping[tuple[int, int], str]
    paper: Mapping[tuple[int, int], float]

    def only(self, labels: Container[str]) -> GridTable | None:
        """The rows and columns that have any of these runs, without other runs and the paper's numbers for them; None
        where no run is left."""
        runs = {place: label for place, label in self.runs.items() if label in labels}
        dropped = self.runs.keys() - runs
        rows, columns = sorted({i for i, _ in runs}), sorted({j for _, j in runs})
        places = {(i, j): (rows.index(i), columns.index(j)) for i in rows for j in columns if (i, j) not in dropped}

        def moved(values: Mapping[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
            return {places[place]: value for place, value in values.items() if place in places}

        kept = replace(
            self,
            rows=tuple(self.rows[i] for i in rows),
            columns=tuple(self.columns[j] for j in columns),
            runs=moved(self.runs),
            reasons=moved(self.reasons),
            paper=moved(self.paper),
        )
        return kept if runs else None


def add_grid(collector: Collector, name: str, grid: Grid, axes: Mapping[str, Axis]) -> GridTable:
    """Add the runs of a grid; their places in its table."""
    row_axes = list(grid.rows) or [axis for axis in axes if axis not in grid.columns][: None if grid.columns else 1]
    column_axes = list(grid.columns) or [axis for axis in axes if axis not in row_axes]
    rows = list(itertools.product(*(axes[axis] for axis in row_axes)))
    columns = list(itertools.product(*(axes[axis] for axis in column_axes)))
    runs: dict[tuple[int, int], str] = {}
    reasons: dict[tuple[int, int], str] = {}
    refused: dict[tuple[int, int], tuple[dict[str, str], list[str]]] = {}
    paper: dict[tuple[int, int], float] = {}
    accepted: set[tuple[str, str]] = set()
    where = f"grids.{name}"
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        chosen = dict(zip((*row_axes, *column_axes), (*row, *column), strict=True))
        chosen = {axis: chosen[axis] for axis in axes}  # in the order of the study
        label = SEPARATOR.join(chosen.values())
        number, problem = _paper(grid.paper, list(chosen.values()))
        if problem:
            collector.report(f"{where}.paper: {problem}")
        if number is not None:
            paper[i, j] = number
        if because := _excluded(grid, chosen):
            reasons[i, j] = because
            continue
        changes, problems = _changes(grid, axes, chosen)
        experiment, mistakes = collector.resolve(label, changes)
        if problems or (mistakes and grid.refused == "error"):
            for problem in problems + mistakes:
                collector.report(problem, f"{where} ({label})")
        elif experiment is None:
            refused[i, j] = (chosen, mistakes)
        else:
            accepted |= set(chosen.items())
            collector.add(label, experiment, number)
            runs[i, j] = label
    for place, (chosen, mistakes) in refused.items():
        # A choice that is refused in every combination is a mistake of its own, not an impossible combination.
        if never := [f"{axis} {label}" for axis, label in chosen.items() if (axis, label) not in accepted]:
            for problem in mistakes:
                collector.report(problem, f"{where} ({SEPARATOR.join(never)})")
        reasons[place] = "; ".join(mistakes)
    for problem in _unused(grid.paper, list(axes.values())):
        collector.report(f"{where}.paper: {problem}")
    return GridTable(
        name,
        grid.title or name,
        grid.note,
        SEPARATOR.join(row_axes),
        tuple(rows),
        tuple(columns),
        {place: collector.labels.get(label, label) for place, label in runs.items()},
        reasons,
        paper,
    )


def _changes(grid: Grid, axes: Mapping[str, Axis], chosen: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """What a combination changes, and its problems: `also` goes over its choices, these over what all runs share.

    No two choices may set the same key.
    """
    changes = {**({} if grid.method is None else {"method": grid.method}), **grid.set}
    by: dict[str, str] = {}
    problems = []
    for axis, label in chosen.items():
        for key, value in axes[axis][label].items():
            if key in by:
                problems.append(f"{key}: set by both axes {by[key]} and {axis}")
            by[key] = axis
            changes[key] = value
    for entry in grid.also:
        if _meant(entry["when"], chosen):
            changes |= entry["set"]
    return changes, problems


def _excluded(grid: Grid, chosen: Mapping[str, str]) -> str:
    for entry in grid.exclude:
        if _meant(entry["when"], chosen):
            return entry["because"]
    return ""


def _meant(when: Mapping[str, Any], chosen: Mapping[str, str]) -> bool:
    return all(label_text(label) == chosen[axis] for axis, label in when.items())


def _paper(numbers: Mapping[str, Any], labels: Sequence[str]) -> tuple[float | None, str]:
    """The number under nested labels, or the problem with what stands there instead."""
    here: Any = numbers
    for depth, label in enumerate(labels):
        if not isinstance(here, Mapping):
            return None, f"{SEPARATOR.join(labels[:depth])}: must be nested by label down to {label}, got {here!r}"
        if label not in here:
            return None, ""
        here = here[label]
    if here is None:
        return None, ""
    if isinstance(here, bool) or not isinstance(here, (int, float)):
        return None, f"{SEPARATOR.join(labels)}: must be a number, got {here!r}"
    return float(here), ""


def _unused(numbers: Mapping[str, Any], axes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels among the paper's numbers that the axis at their depth does not have."""
    if not axes:
        return []
    problems = [
        f"{label!r} is none of {', '.join(axes[0])}.{did_you_mean(str(label), axes[0])}"
        for label in numbers
        if label not in axes[0]
    ]
    for inner in numbers.values():
        if isinstance(inner, Mapping):
            problems += _unused(inner, axes[1:])
    return list(dict.fromkeys(problems))
