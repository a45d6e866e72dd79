"""Checks a comparison without training: resolves every cell, and looks at its data and model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from befit.adapters.layout import Layout
from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, DataError, ModelError
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.runs.estimate import Seen, estimate
from befit.runs.host import shared
from befit.studies.compare.plan import Plan


def check_plan(plan: Plan, data: bool = True) -> dict[str, Any]:
    """Runs, cells, combinations that are left out and why, and warnings. Reads no weights.

    data  look at data and models too: everything that `befit check` finds, once for each setting that cells share

    Raises ConfigError with everything that a run would raise before it trains, each with the cells that have it.
    """
    warnings: dict[str, None] = {}
    if data:
        for warning in _look(plan):
            warnings[warning] = None
    return {
        "name": plan.name,
        "title": plan.head.title,
        "runs": [{"run": run.label, "method": run.cells[0].experiment.method} for run in plan.runs],
        "seeds": list(plan.seeds),
        "cells": len(plan.cells),
        "reference": plan.reference,
        "left_out": [
            {"table": table.name, "row": list(table.rows[i]), "column": list(table.columns[j]), "because": reason}
            for table in plan.tables
            for (i, j), reason in sorted(table.reasons.items())
        ],
        "data_checked": data,
        "warnings": list(warnings),
    }


def _look(plan: Plan) -> list[str]:
    """Warnings of all settings; cells with the same data, model and demands on them are looked at together."""
    warnings: list[str] = []
    problems: dict[str, list[str]] = {}  # each with the cells that have it
    seen: list[tuple[Any, ...]] = []
    looks = _Looks()
    for cell in plan.cells:
        method = build_method(cell.experiment.method)
        checks = type(method).check is not Method.check or cell.experiment.privacy.unit != "none"
        asks = cell.experiment.method if checks else None  # of the model's shapes, or of what its stages read
        setting, experiment = shared(cell.experiment), cell.experiment
        whole = (
            setting,
            experiment.train,
            experiment.federation,
            experiment.guard,
            experiment.privacy,
            method.needs,
            asks,
            _shape_demands(method.layout),
            method.use.mixer,  # one by input demands something of the modules
        )
        if whole in seen:
            continue
        seen.append(whole)
        try:
            warnings += estimate(cell.experiment, looks.at(setting))["warnings"]
        except (ConfigError, DataError, ModelError) as error:
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                problems.setdefault(problem, []).append(f"{cell.label}, seed {cell.seed}")
    if problems:
        lines = [f"{_whose(places)}: {problem}" for problem, places in problems.items()]
        raise ConfigError(lines, f"the cells of {plan.name}")
    return warnings


def _shape_demands(layout: Layout) -> tuple[Any, ...]:
    """The parts of a layout that a model's shapes can violate."""
    return frozenset((slot.rank, slot.form) for slot in layout.slots), layout.extras


class _Looks:
    """Looks at data and models once for each setting, and remembers the last setting: cells come seed by seed."""

    def __init__(self) -> None:
        self._setting: Experiment | None = None
        self._results: dict[str, Any] = {}

    def at(self, setting: Experiment) -> _Looks:
        if setting != self._setting:
            self._setting, self._results = setting, {}
        return self

    def __call__(self, what: str, look: Callable[[], Seen]) -> Seen:
        if what not in self._results:
            self._results[what] = look()
        return self._results[what]


def _whose(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{len(places)} cells, first {places[0]}"
