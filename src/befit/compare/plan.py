"""From a recipe, or a configuration and some methods, to the cells of a comparison. Reads no data, trains nothing."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from befit.claim import deciding
from befit.compare.recipe import Grid, Head, Recipe, label_text
from befit.config import Experiment, load_experiment, run_names, to_dict
from befit.config_overrides import apply_overrides, put
from befit.config_parse import parse_experiment
from befit.config_seeds import with_seed
from befit.errors import ConfigError, did_you_mean
from befit.host import resolve_model
from befit.registry import get_method

__all__ = ["Cell", "GridTable", "Plan", "PlannedRun", "plan_config", "plan_recipe"]

SIZE = ("rank", "alpha")  # of an adapter: what methods that a configuration does not mention take over from it
SEPARATOR = " · "  # between the labels of a grid's run


@dataclass(frozen=True)
class Cell:
    """One run with one seed. `key` is a hash of everything that decides its numbers."""

    label: str
    seed: int
    experiment: Experiment
    key: str

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        return f"{slug(self.label)}-s{self.seed}-{self.key}"


@dataclass(frozen=True)
class PlannedRun:
    """One run with all seeds. `paper` is the paper's number, in the paper's unit."""

    label: str
    cells: tuple[Cell, ...]
    paper: float | None = None

    @property
    def method(self) -> str:
        return self.cells[0].experiment.method["name"]


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


@dataclass(frozen=True)
class Plan:
    """Everything that is to be run. `reference` is the label of the run that others are compared with."""

    name: str
    head: Head
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    tables: tuple[GridTable, ...]
    reference: str

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that one backbone and one partition serve all runs of a seed."""
        return [run.cells[index] for index in range(len(self.seeds)) for run in self.runs]


def plan_config(
    source: Experiment | Mapping[str, Any] | Path | str,
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    overrides: Sequence[str] = (),
    reference: str | None = None,
) -> Plan:
    """One run for each method. Raises ConfigError with all problems.

    methods  a method that the configuration has, as its own or as a baseline, is taken with the arguments there; any
             other with its defaults and the rank and alpha of the configuration's own. Default: all that it has
    """
    experiment = load_experiment(source, overrides)
    blocks = dict(zip(run_names(experiment), (experiment.method, *experiment.baselines), strict=True))
    problems: list[str] = []
    if methods is None:  # baselines first, as in a run's tables
        own, *others = blocks
        methods = [*others, own]
    if repeated := sorted({name for name in methods if list(methods).count(name) > 1}):
        problems.append(f"--methods: {', '.join(repeated)} more than once")
    chosen: dict[str, Any] = {}
    for name in methods:
        try:
            chosen[name] = blocks.get(name) or _like(name, experiment.method)
        except ConfigError as error:
            problems += [problem.replace("method.name", "--methods", 1) for problem in error.problems]
    if problems:
        raise ConfigError(problems, "the command")
    base = {**to_dict(experiment), "baselines": []}
    made = _Maker(base, Path.cwd(), (), _chosen_seeds(seeds, None, experiment.federation.seed))
    for label, block in chosen.items():
        made.run(label, {"method": block}, None)
    head = Head(experiment.name)
    return made.plan(f"{experiment.name}-compare", head, [], reference, f"the methods for {experiment.name}")


def plan_recipe(
    recipe: Recipe, seeds: Sequence[int] | None = None, overrides: Sequence[str] = (), reference: str | None = None
) -> Plan:
    """All runs of a recipe, those of its grids after the named ones. Raises ConfigError with all problems.

    overrides  `key=value` on top of every run, whatever the recipe says
    """
    base = {**copy.deepcopy(recipe.base), "baselines": []}
    base.setdefault("name", recipe.name)
    own = base.get("federation", {}).get("seed", 0) if isinstance(base.get("federation"), Mapping) else 0
    made = _Maker(base, recipe.folder, overrides, _chosen_seeds(seeds, recipe.seeds, own))
    for label, entry in recipe.runs.items():
        changes = {**({} if entry.method is None else {"method": entry.method}), **entry.set}
        made.run(label, changes, entry.paper, f"runs.{label}")
    tables = [_table(made, name, grid, recipe.axes[name]) for name, grid in recipe.grids.items()]
    return made.plan(recipe.name, recipe.head, tables, reference or recipe.head.reference, recipe.where)


class _Maker:
    """Collects runs, each only once whatever it is called, and everything that is wrong with them."""

    def __init__(self, base: dict[str, Any], folder: Path, overrides: Sequence[str], seeds: tuple[int, ...]) -> None:
        self.base, self.folder, self.overrides, self.seeds = base, folder, overrides, seeds
        self.runs: dict[str, PlannedRun] = {}
        self.labels: dict[str, str] = {}  # every label, to that of the run which it means
        self.problems: dict[str, list[str]] = {}  # what is wrong, and where

    def resolve(self, label: str, changes: Mapping[str, Any]) -> tuple[Experiment | None, list[str]]:
        """The base with changes and overrides on top; shorter keys first, so that method comes before method.rank."""
        values = copy.deepcopy(self.base)
        problems: list[str] = []
        for key in sorted(changes, key=lambda key: key.count(".")):
            if problem := put(values, key.split("."), copy.deepcopy(changes[key])):
                problems.append(f"{key}: {problem}")
        problems += apply_overrides(values, self.overrides)
        values["name"] = slug(label)
        experiment, found = parse_experiment(values, self.folder)
        return (None if problems else experiment), problems + found

    def run(self, label: str, changes: Mapping[str, Any], paper: float | None, where: str = "") -> list[str]:
        """Add a run, or say what is wrong with it."""
        experiment, problems = self.resolve(label, changes)
        for problem in problems:
            self.problems.setdefault(problem, []).append(where or label)
        if experiment is not None:
            self.add(label, experiment, paper)
        return problems

    def add(self, label: str, experiment: Experiment, paper: float | None) -> None:
        if label in self.labels:
            self.problems.setdefault(f"two runs are called {label!r}: give one another name", []).append("")
            return
        cells = []
        for seed in self.seeds:
            one = resolve_model(with_seed(experiment, seed))
            cells.append(Cell(label, seed, one, fingerprint(one)))
        same = next((run.label for run in self.runs.values() if run.cells[0].key == cells[0].key), label)
        self.labels[label] = same
        if same == label:
            self.runs[label] = PlannedRun(label, tuple(cells), paper)
        elif paper is not None and self.runs[same].paper is None:
            self.runs[same] = replace(self.runs[same], paper=paper)

    def plan(self, name: str, head: Head, tables: list[GridTable], reference: str | None, where: str) -> Plan:
        problems = [_placed(problem, places) for problem, places in self.problems.items()]
        problems += _scored_alike(list(self.runs.values()))
        if reference is not None and reference not in self.labels and self.runs:
            known = ", ".join(self.labels)
            problems.append(f"reference: there is no run {reference!r}.{did_you_mean(reference, self.labels)} "
                            f"Known: {known}")  # fmt: skip
        if problems:
            raise ConfigError(problems, where)
        local = [run.label for run in self.runs.values() if run.method == "local"]
        chosen = self.labels[reference] if reference is not None else [*local, *self.runs][0]
        return Plan(name, head, self.seeds, tuple(self.runs.values()), tuple(tables), chosen)


def _table(made: _Maker, name: str, grid: Grid, axes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> GridTable:
    """Add the runs of a grid, and say where they stand in its table."""
    row_axes = list(grid.rows) or [one for one in axes if one not in grid.columns][: None if grid.columns else 1]
    column_axes = list(grid.columns) or [one for one in axes if one not in row_axes]
    rows = list(itertools.product(*(axes[one] for one in row_axes)))
    columns = list(itertools.product(*(axes[one] for one in column_axes)))
    runs: dict[tuple[int, int], str] = {}
    reasons: dict[tuple[int, int], str] = {}
    refused: dict[tuple[int, int], tuple[dict[str, str], list[str]]] = {}
    paper: dict[tuple[int, int], float] = {}
    accepted: set[tuple[str, str]] = set()
    where = f"grids.{name}"
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        chosen = dict(zip((*row_axes, *column_axes), (*row, *column), strict=True))
        chosen = {axis: chosen[axis] for axis in axes}  # in the order of the recipe
        label = SEPARATOR.join(chosen.values())
        number, problem = _paper(grid.paper, list(chosen.values()))
        if problem:
            made.problems.setdefault(f"{where}.paper: {problem}", []).append("")
        if number is not None:
            paper[i, j] = number
        if because := _excluded(grid, chosen):
            reasons[i, j] = because
            continue
        changes, problems = _changes(grid, axes, chosen)
        experiment, found = made.resolve(label, changes)
        if problems or (found and grid.refused == "error"):
            for one in problems + found:
                made.problems.setdefault(one, []).append(f"{where} ({label})")
        elif experiment is None:
            refused[i, j] = (chosen, found)
        else:
            accepted |= set(chosen.items())
            made.add(label, experiment, number)
            runs[i, j] = label
    for place, (chosen, found) in refused.items():
        # A choice that is refused whatever it is combined with is a mistake, and no impossible combination.
        if never := [f"{axis} {label}" for axis, label in chosen.items() if (axis, label) not in accepted]:
            for one in found:
                made.problems.setdefault(one, []).append(f"{where} ({SEPARATOR.join(never)})")
        reasons[place] = "; ".join(found)
    made.problems |= {f"{where}.paper: {one}": [""] for one in _unused(grid.paper, list(axes.values()))}
    return GridTable(
        name, grid.title or name, grid.note, SEPARATOR.join(row_axes), tuple(rows), tuple(columns),
        {place: made.labels.get(label, label) for place, label in runs.items()}, reasons, paper,
    )  # fmt: skip


def _changes(
    grid: Grid, axes: Mapping[str, Mapping[str, Mapping[str, Any]]], chosen: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """What a combination changes: its choices over what all runs of the grid share. No two choices may set one key."""
    changes = {**({} if grid.method is None else {"method": grid.method}), **grid.set}
    by: dict[str, str] = {}
    problems = []
    for axis, label in chosen.items():
        for key, value in axes[axis][label].items():
            if key in by:
                problems.append(f"{key}: set by both axes {by[key]} and {axis}")
            by[key] = axis
            changes[key] = value
    return changes, problems


def _excluded(grid: Grid, chosen: Mapping[str, str]) -> str:
    for entry in grid.exclude:
        if all(label_text(label) == chosen[axis] for axis, label in entry["when"].items()):
            return entry["because"]
    return ""


def _paper(numbers: Mapping[str, Any], labels: Sequence[str]) -> tuple[float | None, str]:
    """The number under nested labels, and what is wrong where there is none but something else."""
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
    problems = [f"{label!r} is none of {', '.join(axes[0])}.{did_you_mean(str(label), axes[0])}"
                for label in numbers if label not in axes[0]]  # fmt: skip
    for inner in numbers.values():
        if isinstance(inner, Mapping):
            problems += _unused(inner, axes[1:])
    return list(dict.fromkeys(problems))


def _like(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """A method with its defaults, and the size of the adapter of another one where it has such arguments."""
    known = {parameter.name for parameter in get_method(name).parameters}
    return {"name": name, **{key: own[key] for key in SIZE if key in own and key in known}}


def _chosen_seeds(given: Sequence[int] | None, usual: Sequence[int] | None, own: Any) -> tuple[int, ...]:
    if given is not None and (not given or len(set(given)) < len(given) or min(given) < 0):
        raise ConfigError([f"--seeds: must be different whole numbers from 0, got {list(given)}"], "the command")
    return tuple(given or usual or (own if isinstance(own, int) else 0,))


def _scored_alike(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """What would make the numbers of one table mean different things."""
    for name in ("split", "metrics", "generate"):
        values: dict[str, str] = {}
        for run in runs:
            values.setdefault(json.dumps(getattr(run.cells[0].experiment.evaluate, name)), run.label)
        if len(values) > 1:
            listed = " and ".join(f"{value} ({label})" for value, label in list(values.items())[:2])
            yield f"evaluate.{name}: must be the same for all runs of a comparison, got {listed}"
    if any(run.cells[0].experiment.engine.kind != "local" for run in runs):
        yield "engine.kind: comparisons run on this machine (local)"


def _placed(problem: str, places: Sequence[str]) -> str:
    """A problem with the first place where it was found, and in how many more."""
    first, *others = dict.fromkeys(places)
    where = f"{first}: " if first else ""
    return f"{where}{problem}" + (f" (and {len(others)} more)" if others else "")


def fingerprint(experiment: Experiment) -> str:
    """Hash of all that decides the numbers of a run (not its name, nor how often it is saved)."""
    text = json.dumps(deciding(to_dict(experiment)), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def slug(label: str) -> str:
    """A label as a folder's name.

    >>> slug("FedAvg · A & B · ReLoRA")
    'fedavg-a-b-relora'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60].strip("-") or "run"
