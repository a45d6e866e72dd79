"""Reads finished cells: every client's score, bytes, seconds and steps, and the curve."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from befit.core.errors import DIVERGED, Damaged
from befit.core.storage import read_lines, read_sealed
from befit.report.diagnostics import alarm_counts, client_means
from befit.report.numbers import score_of
from befit.report.results import RunResults
from befit.runs.deploy import CHOICE
from befit.runs.groups import Rows
from befit.runs.provenance import read_manifest
from befit.studies.compare.beside import scores_beside
from befit.studies.compare.cells import PlannedRun, StudyCell, find_folder


@dataclass(frozen=True)
class Scores:
    """One cell's numbers.

    folder           its run directory, counted from the comparison's; empty where another comparison ran it
    data             the partition's hash, where the benchmark has one, and what part of it was read if not all
    tested_hash      the same of what is measured on alone, where that is known apart
    rows, newcomers  by client or newcomer, its information and all its measurements, with further budgets and metrics
    beside           other scores of the whole run by key, see `befit.studies.compare.beside`
    auc              every client's mean over all scored rounds (A_AUC of FedMosaic)
    diagnostics      means over clients of the numbers that the method names
    weights          of its models, by name, see `befit.models.source.weights_hash`; empty where that was not noted
    alarms           what its report warns of, see `befit.report.diagnostics.alarm_counts`
    """

    seed: int
    folder: str
    metric: str
    split: str
    clients: dict[str, float | None]
    examples: dict[str, int]
    bytes_up: int
    bytes_down: int
    seconds: float
    steps: float
    data: str | None
    curve: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failures: int = 0
    diverged: bool = False  # training came to numbers that are not finite, at some client
    cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    rows: Rows = field(default_factory=dict[str, Mapping[str, Any]])
    newcomers: Rows = field(default_factory=dict[str, Mapping[str, Any]])
    beside: dict[str, float] = field(default_factory=dict[str, float])
    auc: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    diagnostics: dict[str, float] = field(default_factory=dict[str, float])
    alarms: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    tested_hash: str | None = None
    weights: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def tested(self) -> str | None:
        """The same for cells that were measured on the same examples."""
        return self.tested_hash or self.data

    @property
    def partition(self) -> str | None:
        """The partition's hash, where the benchmark has one."""
        return None if self.data is None else self.data.split(",")[0]

    @property
    def known(self) -> dict[str, float]:
        """The clients that have a score."""
        return {client: value for client, value in self.clients.items() if value is not None}

    @property
    def mean(self) -> float | None:
        """The mean over clients that have a score."""
        return statistics.fmean(self.known.values()) if self.known else None


@dataclass(frozen=True)
class FinishedRun:
    """A run with the seeds that have results."""

    run: PlannedRun
    cells: tuple[Scores, ...]


def collect(out: Path, run: PlannedRun, kept: Mapping[str, Scores]) -> FinishedRun:
    """Read all of a run's cells that are finished, here or in what was kept of another comparison, by key."""
    cells = list[Scores]()
    for cell in run.cells:
        path = find_folder(out, cell)
        if (path / "report.html").exists():
            cells.append(_scores(out, cell, path))
        elif cell.key in kept:
            cells.append(kept[cell.key])
    return FinishedRun(run, tuple(cells))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; of one whose clients choose what they deploy those of all its methods, which all of them
    trained."""
    chose = read_sealed(path / "results.json")["method"] == CHOICE
    baselines = sorted((path / "baselines").glob("*/metrics.jsonl")) if chose else []
    if not (own := path / "metrics.jsonl").exists():
        raise Damaged(f"{own} is missing")
    return [line for file in (own, *baselines) for line in read_lines(file)]


def _scores(out: Path, cell: StudyCell, path: Path) -> Scores:
    try:
        results, basis, lines = (
            read_sealed(path / "results.json"),
            read_manifest(path),
            _lines(path),
        )
    except Damaged as error:
        raise Damaged(f"{error}. Or remove {path}, and the same command does this run again") from error
    metric, rows = results["metric"], results["clients"]
    partition, limit = basis["data"].get("partition", {}), basis["data"].get("limit")
    divided, tested = partition.get("sha256"), partition.get("split_sha256", {}).get(results["split"])
    if results["split"] == "val" and (fold := basis["data"].get("fold")):
        tested = f"{divided}, fold {fold} of seed {cell.seed}"  # the hash is that of fold 0, and the seed draws others
    part = f", of which {json.dumps(limit, sort_keys=True)}" if limit else ""
    steps: dict[str, int] = dict.fromkeys(rows, 0)
    for line in lines:
        if line["kind"] == "train":
            steps[line["client"]] += line["steps"]
    return Scores(
        seed=cell.seed,
        folder=str(path.relative_to(out)),
        metric=metric,
        split=results["split"],
        clients={client: score_of(row, metric) for client, row in rows.items()},
        examples={client: row["examples"] for client, row in rows.items()},
        bytes_up=results["summary"]["bytes_up"],
        bytes_down=results["summary"]["bytes_down"],
        seconds=results["summary"]["seconds"],
        cpu_seconds=results["summary"]["cpu_seconds"],
        server_cpu_seconds=results["summary"]["server_cpu_seconds"],
        steps=sum(steps.values()) / max(1, len(steps)),
        data=f"{divided}{part}" if limit else divided,
        tested_hash=tested and f"{tested}{part}",
        auc={client: score_of(row.get("over_time") or {}, "self_auc") for client, row in rows.items()},
        curve=results["curves"].get(results["method"], []),
        failures=len(results["failures"]),
        diverged=any(failure["kind"] in DIVERGED for failure in results["failures"]),
        rows=rows,
        newcomers=(results.get("newcomers") or {}).get("clients") or {},
        beside=scores_beside(cast(RunResults, results)),
        diagnostics=client_means(cast(RunResults, results)),
        alarms=alarm_counts(cast(RunResults, results)),
        weights=basis.get("weights", {}),
    )
