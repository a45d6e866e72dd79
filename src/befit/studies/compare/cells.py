"""The cells of a comparison: each run once, even where a study names it twice, and all problems with them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment
from befit.config.overrides import apply_overrides, put, with_seed
from befit.config.parse import parse_experiment
from befit.core.schema import plain
from befit.protocol.registry import get_method
from befit.runs.loading import resolve_model
from befit.runs.provenance import settings_hash


@dataclass(frozen=True)
class StudyCell:
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
    cells: tuple[StudyCell, ...]
    paper: float | None = None

    @property
    def method(self) -> str:
        return self.cells[0].experiment.method["name"]


class Collector:
    """Collects runs, each once even where it has two labels, and all problems with them."""

    def __init__(self, base: dict[str, Any], folder: Path, overrides: Sequence[str], seeds: tuple[int, ...]) -> None:
        self.base, self.folder, self.overrides, self.seeds = base, folder, overrides, seeds
        self.runs: dict[str, PlannedRun] = {}
        self.labels: dict[str, str] = {}  # every label, and the label under which its run is kept
        self.named: dict[str, None] = {}  # also labels of what cannot be a run
        self.problems: dict[str, list[str]] = {}  # each problem, and where it occurs

    def report(self, problem: str, where: str = "") -> None:
        self.problems.setdefault(problem, []).append(where)

    def resolve(self, label: str, changes: Mapping[str, Any]) -> tuple[Experiment | None, list[str]]:
        """The base with changes and overrides on top; shorter keys first, so that method comes before method.rank."""
        values = copy.deepcopy(self.base)
        problems: list[str] = []
        for key in sorted(changes, key=lambda key: key.count(".")):
            if problem := put(values, key.split("."), copy.deepcopy(changes[key])):
                problems.append(f"{key}: {problem}")
        problems += apply_overrides(values, self.overrides)
        values["name"] = slug(label)
        experiment, mistakes = parse_experiment(values, self.folder)
        if problems or experiment is None:
            return None, problems + mistakes
        return replace(experiment, method=written_out(experiment.method)), []

    def run(self, label: str, changes: Mapping[str, Any], paper: float | None, where: str = "") -> list[str]:
        """Add a run; the problems where it cannot be one."""
        self.named[label] = None
        experiment, problems = self.resolve(label, changes)
        for problem in problems:
            self.report(problem, where or label)
        if experiment is not None:
            self.add(label, experiment, paper)
        return problems

    def add(self, label: str, experiment: Experiment, paper: float | None) -> None:
        self.named[label] = None
        if label in self.labels:
            self.report(f"two runs are called {label!r}: give one another name")
            return
        cells = []
        for seed in self.seeds:
            resolved = resolve_model(with_seed(experiment, seed))
            cells.append(StudyCell(label, seed, resolved, settings_hash(resolved)))
        same = next((run.label for run in self.runs.values() if run.cells[0].key == cells[0].key), label)
        self.labels[label] = same
        if same == label:
            self.runs[label] = PlannedRun(label, tuple(cells), paper)
        elif paper is not None and self.runs[same].paper is None:
            self.runs[same] = replace(self.runs[same], paper=paper)


def find_folder(out: Path, cell: StudyCell) -> Path:
    """The cell's run directory: the one with its key, whatever its label was then, or where it will be."""
    folders = sorted((out / "runs").glob(f"*-{cell.key}"))
    return folders[0] if folders else out / "runs" / cell.folder


def written_out(method: Mapping[str, Any]) -> dict[str, Any]:
    """A method's block with the defaults inside its blocks too, so that equal settings are equal blocks."""
    blocks = {parameter.name: plain(parameter.default) for parameter in get_method(method["name"]).parameters}
    return {
        key: {**blocks[key], **value} if isinstance(value, dict) and isinstance(blocks.get(key), dict) else value
        for key, value in method.items()
    }


def slug(label: str) -> str:
    """A label as a folder's name.

    >>> slug("FedAvg · A & B · ReLoRA")
    'fedavg-a-b-relora'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60].strip("-") or "run"
