"""A study as people write it: it is read strictly, and all its mistakes are reported at once. `plan` makes the cells.

study: {title: …, about: …, paper: …, table: …, reference: Local, note: …}
plugins: [my_method.py]
base: a configuration, or the path of one from the study's folder
seeds: [0, 1, 2]
choose: {seeds: [100, 101], axes: {train.lr: [1e-3, 1e-2]}}
runs:
  Local: {method: {name: local, rounds: 40}}
  FedIT: {method: fedit, set: {federation.rounds: 60}, paper: 61.28}
grids:
  table-1:
    axes:
      merge: {FedAvg: {method.merge.rule: mean}, TIES: {method.merge.rule: ties}}
      train.lr: [1e-3, 1e-4]
    rows: [merge]
    columns: [train.lr]
    exclude: [{when: {merge: TIES, train.lr: 1e-4}, because: …}]
    paper: {FedAvg: {"0.001": 46.70}}
claims:
  federating-pays: {says: Averaging is better than training alone, better: {FedIT: Local}, by: 1.0}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from befit.config.experiment import Experiment
from befit.config.load import add_plugins, names_runs, read_source
from befit.config.overrides import seeds_problem
from befit.core.errors import ConfigError, did_you_mean
from befit.core.plugins import resolve_plugins
from befit.core.schema import POSITIVE, check_values, parameters_of, show
from befit.studies.compare.claims import Claim, claim_problems
from befit.studies.compare.statistics import LEVEL


@dataclass(frozen=True)
class Head:
    """What a study is about.

    title      heading of the page
    about      a sentence or two on what it can and cannot show
    paper      whose numbers stand beside ours, such as arXiv:2602.18658
    table      which of its tables
    note       how the paper's numbers were measured (metric, data, seeds)
    reference  the run that the others are compared with; default: the one of the method local, else the first
    looks      how many times results have been read, each time with more seeds; each look after the first halves the
               level of 5 % at which a difference is shown, so that all together stay below 10 %
    """

    title: str
    about: str = ""
    paper: str = ""
    table: str = ""
    note: str = ""
    reference: str | None = None
    looks: Annotated[int, POSITIVE] = 1

    @property
    def level(self) -> float:
        return LEVEL / 2 ** (self.looks - 1)


@dataclass(frozen=True)
class Choose:
    """What is chosen on validation examples before anything is reported; see docs/protocol.md.

    seeds     of the runs that are chosen by: none that the study reports
    axes      by dotted key, the values that every run tries
    runs      by label, axes that this run tries beside those, or with other values
    families  by a name, runs that are given one choice together: the one with the best mean over them
    compute   equal: each run's train.max_steps is what costs a client as much, in all its rounds, as the base's rounds
              and steps of one adapter do; as-written: it stays
    """

    seeds: list[int]
    axes: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    runs: dict[str, dict[str, list[Any]]] = field(default_factory=dict[str, dict[str, list[Any]]])
    families: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    compute: Literal["equal", "as-written"] = "equal"


@dataclass(frozen=True)
class RunEntry:
    """One run by name.

    method  its method; default: that of the base
    set     changes of the base by dotted key
    paper   the paper's number
    """

    method: str | dict[str, Any] | None = None
    set: dict[str, Any] = field(default_factory=dict[str, Any])
    paper: float | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """Of the base, by dotted key."""
        return {**({} if self.method is None else {"method": self.method}), **self.set}


@dataclass(frozen=True)
class Grid:
    """All combinations of some choices, as a table of two dimensions.

    axes     by name, the choices: a mapping from a label to changes by dotted key, or, where the name is itself such
             a key, a list of values
    title    of the table
    method   of all its runs
    set      changes that all its runs share
    rows     axes whose labels name the rows; default: the first
    columns  axes whose labels name the columns; default: the others
    exclude  combinations to leave out: [{when: {AXIS: LABEL, …}, because: …}]
    also     changes of some combinations, over those of the choices: [{when: {AXIS: LABEL, …}, set: {…}}]
    refused  what happens with a combination that befit refuses: an error, or it is left out, with the reason below
             the table
    paper    the paper's numbers, nested by label in the order of the axes
    note     below the table
    """

    axes: dict[str, Any]
    title: str = ""
    method: str | dict[str, Any] | None = None
    set: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: list[str] = field(default_factory=list[str])
    columns: list[str] = field(default_factory=list[str])
    exclude: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    also: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: Literal["error", "leave-out"] = "error"
    paper: dict[str, Any] = field(default_factory=dict[str, Any])
    note: str = ""


@dataclass(frozen=True)
class StudyFile:
    """A study as people write it, with runs, grids or both.

    base     a configuration, or the path of one from the study's folder; its method can be left to the runs
    study    what the study is about
    plugins  Python files or modules with methods, benchmarks or tasks of your own
    seeds    every run is repeated for each; default: the base's one
    choose   what is chosen on validation examples before anything is reported
    runs     by label, a method or a run
    grids    by name, tables of runs
    claims   by name, what the runs are to show
    """

    base: str | Experiment
    study: Head | None = None
    plugins: list[str] = field(default_factory=list[str])
    seeds: list[int] | None = None
    choose: Choose | None = None
    runs: dict[str, str | RunEntry] = field(default_factory=dict[str, str | RunEntry])
    grids: dict[str, Grid] = field(default_factory=dict[str, Grid])
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])


Axis = Mapping[str, Mapping[str, Any]]  # label -> changes by dotted key


@dataclass(frozen=True)
class Study:
    """A study that has been read, with the base as plain values and the folder that its paths count from."""

    name: str
    where: str
    head: Head
    base: dict[str, Any]
    folder: Path
    seeds: tuple[int, ...] | None
    choose: Choose | None = None
    runs: dict[str, RunEntry] = field(default_factory=dict[str, RunEntry])
    grids: dict[str, Grid] = field(default_factory=dict[str, Grid])
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    axes: dict[str, dict[str, Axis]] = field(default_factory=dict[str, dict[str, Axis]])  # by grid and name


def is_study(path: Path | str) -> bool:
    """Whether a file is a study and not a configuration: it has the key `study` or `runs` or `grids`."""
    values, *_ = read_source(path)
    return names_runs(values)


def read_study(source: Path | str | Mapping[str, Any], plugins: Sequence[str] = ()) -> Study:
    """A study from its file or its content; `plugins` come beside its own. Raises ConfigError with every problem."""
    values, folder, where, name = read_source(source)
    add_plugins(values, plugins)
    known = [key.name for key in parameters_of(StudyFile)]
    problems = [
        f"{key}: unknown key for a study.{did_you_mean(key, known) or ' Known: ' + ', '.join(known)}"
        for key in values
        if key not in known
    ]
    head = _block(Head, values.get("study"), "study", problems)
    base, base_folder = _base(values.get("base"), folder, problems)
    own = values.get("plugins", [])
    if isinstance(own, list) and all(isinstance(plugin, str) for plugin in own):
        base["plugins"] = [*resolve_plugins(own, folder), *(base.get("plugins") or [])]
    else:
        problems.append(f"plugins: must be a list of Python files or modules, such as [my_method.py], got {show(own)}")
    seeds = _seeds(values.get("seeds"), problems)
    choose = _block(Choose, values["choose"], "choose", problems) if values.get("choose") is not None else None
    runs = _entries(RunEntry, values.get("runs"), "runs", problems, short="method")
    grids = _entries(Grid, values.get("grids"), "grids", problems)
    axes = {label: _axes(grid, f"grids.{label}", problems) for label, grid in grids.items()}
    claims = _entries(Claim, values.get("claims"), "claims", problems, owner="a claim")
    if not problems and not runs and not grids:
        problems.append("runs: a study needs runs or grids, such as runs: {Local: local, FedIT: fedit}")
    if choose is not None:
        problems += [*_choice(choose, runs, grids, seeds), *claim_problems(claims, list(runs))]
    if problems:
        raise ConfigError(problems, where)
    return Study(name or "comparison", where, head, base, base_folder, seeds, choose, runs, grids, claims, axes)


# The functions below read one part of a study each, and add what is wrong with it to `problems`.


def _block(kind: Any, value: Any, path: str, problems: list[str], owner: str = "") -> Any:
    """One mapping as a dataclass, or None where something is wrong with it."""
    if not isinstance(value, Mapping):
        keys = ", ".join(parameter.name for parameter in parameters_of(kind))
        found = "and is missing" if value is None else f"got {show(value)}"
        problems.append(f"{path}: must be a mapping with {keys}, {found}")
        return None
    checked, mistakes = check_values(parameters_of(kind), value, f"{path}.", owner or path)
    problems += mistakes
    return None if mistakes else kind(**checked)


def _entries(
    kind: Any, values: Any, path: str, problems: list[str], short: str = "", owner: str = "a grid"
) -> dict[str, Any]:
    """A mapping of named blocks. Where `short` is given, a text stands for a block with only that key."""
    if not isinstance(values, Mapping):
        if values is not None:
            problems.append(f"{path}: must be a mapping from a name to what it is, got {show(values)}")
        return {}
    owner = "a run" if short else owner
    blocks = {
        label: _block(
            kind, {short: value} if short and isinstance(value, str) else value, f"{path}.{label}", problems, owner
        )
        for label, value in values.items()
    }
    return {label: block for label, block in blocks.items() if block is not None}


def _base(value: Any, folder: Path, problems: list[str]) -> tuple[dict[str, Any], Path]:
    """The base's values and the folder that its relative paths count from."""
    if isinstance(value, str):
        try:
            values, base_folder, *_ = read_source(folder / value)
        except ConfigError as error:
            problems += [f"base: {problem}" for problem in error.problems]
            return {}, folder
        return values, base_folder
    if not isinstance(value, Mapping):
        problems.append(f"base: must be a configuration or the path of one, got {show(value)}")
        return {}, folder
    return dict(value), folder


def _seeds(value: Any, problems: list[str]) -> tuple[int, ...] | None:
    if value is None:
        return None
    if problem := seeds_problem(value):
        problems.append(f"seeds: {problem}")
        return None
    return tuple(value)


def _choice(
    choose: Choose, runs: Mapping[str, RunEntry], grids: Mapping[str, Grid], seeds: Sequence[int] | None
) -> list[str]:
    """What is wrong with what is to be chosen."""
    problems: list[str] = []
    _seeds(choose.seeds, mistakes := [])
    problems += [f"choose.{problem}" for problem in mistakes]
    if grids:
        problems.append("choose: chooses for runs by name; put the grids into a study of their own")
    if both := sorted(set(choose.seeds) & set(seeds or ())):
        problems.append(f"choose.seeds: {both[0]} is among the seeds that are reported")
    members = [(f"choose.families.{name}", label) for name, labels in choose.families.items() for label in labels]
    for where, label in [*[("choose.runs", label) for label in choose.runs], *members]:
        if label not in runs:
            problems.append(f"{where}: there is no run {label!r}.{did_you_mean(label, runs)}")
    of = [label for _, label in members]
    problems += [f"choose.families: {label!r} is named twice" for label in dict.fromkeys(of) if of.count(label) > 1]
    for name, labels in choose.families.items():
        axes = [{**choose.axes, **choose.runs.get(label, {})} for label in labels]
        if any(other != axes[0] for other in axes):
            problems.append(f"choose.families.{name}: its runs try different values, so that none is common to them")
    if choose.compute == "equal" and any("train.max_steps" in axes for axes in (choose.axes, *choose.runs.values())):
        problems.append("choose.axes: train.max_steps is what choose.compute: equal sets; set as-written to choose it")
    for where, axes in [("choose.axes", choose.axes), *((f"choose.runs.{k}", v) for k, v in choose.runs.items())]:
        problems += [f"{where}.{key}: must have at least one value" for key, values in axes.items() if not values]
        problems += [
            f"{where}.{key}: names {show(value)} twice"
            for key, values in axes.items()
            for number, value in enumerate(values)
            if values.index(value) == number and values.count(value) > 1
        ]
        problems += [
            f"{where}.{key}: is what a run is or is repeated with, and cannot be chosen"
            for key in axes
            if key in ("method", "method.name", "federation.seed", "benchmark.seed", "evaluate.split")
        ]
    return problems


def _axes(grid: Grid, path: str, problems: list[str]) -> dict[str, Axis]:
    """Every axis as labels with their changes."""
    before = len(problems)
    if not grid.axes:
        problems.append(f"{path}.axes: must have at least one axis")
    axes: dict[str, Axis] = {}
    for name, choices in grid.axes.items():
        here = f"{path}.axes.{name}"
        if isinstance(choices, list) and choices:
            labels = [label_text(choice) for choice in choices]
            axes[name] = {label: {name: value} for label, value in zip(labels, choices, strict=True)}
            if len(axes[name]) < len(choices):
                problems.append(f"{here}: has a value twice")
        elif isinstance(choices, Mapping) and choices:
            axes[name] = {label: changes or {} for label, changes in choices.items()}
            problems += [
                f"{here}.{label}: must be changes by dotted key, such as {{train.lr: 1e-3}}, got {show(changes)}"
                for label, changes in axes[name].items()
                if not isinstance(changes, Mapping)
            ]
        else:
            form = "must be a list of values, or a mapping from labels to changes"
            problems.append(f"{here}: {form}, got {show(choices)}")
    for key in ("rows", "columns"):
        problems += [
            f"{path}.{key}: {name!r} is no axis.{did_you_mean(name, grid.axes)}"
            for name in getattr(grid, key)
            if name not in grid.axes
        ]
    if len(problems) > before:
        return axes
    both = [*grid.rows, *grid.columns]
    if grid.rows and grid.columns and sorted(both) != sorted(grid.axes):
        problems.append(f"{path}.columns: rows and columns together must name every axis once, got {', '.join(both)}")
    elif len(set(both)) < len(both):
        problems.append(f"{path}.rows: names an axis twice")
    problems += _conditions(grid.exclude, axes, f"{path}.exclude", "because", str)
    problems += _conditions(grid.also, axes, f"{path}.also", "set", Mapping)
    return axes


def _conditions(
    entries: Sequence[Mapping[str, Any]], axes: Mapping[str, Axis], path: str, key: str, kind: type
) -> list[str]:
    """What is wrong with a list of {when: {AXIS: LABEL}, key: …}."""
    problems = []
    for number, entry in enumerate(entries):
        here = f"{path}.{number}"
        when, value = entry.get("when"), entry.get(key)
        if set(entry) != {"when", key} or not isinstance(when, Mapping) or not isinstance(value, kind):
            form = "a reason" if kind is str else "{train.lr: 1e-3}"
            problems.append(f"{here}: must be {{when: {{AXIS: LABEL}}, {key}: {form}}}, got {show(entry)}")
            continue
        for name, label in when.items():
            if name not in axes:
                problems.append(f"{here}.when: {name!r} is no axis.{did_you_mean(str(name), axes)}")
            elif (text := label_text(label)) not in axes[name]:
                hint = f"{', '.join(axes[name])}.{did_you_mean(text, axes[name])}"
                problems.append(f"{here}.when.{name}: {show(label)} is none of {hint}")
    return problems


def label_text(value: Any) -> str:
    """The label of an axis's value.

    >>> label_text("TIES"), label_text(1e-3), label_text(True)
    ('TIES', '0.001', 'true')
    """
    return value if isinstance(value, str) else show(value)
