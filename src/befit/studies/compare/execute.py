"""Cells become run directories: in this process or in several, each done once, and a failure stops no other."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, to_dict
from befit.core.errors import DIVERGED, BefitError
from befit.core.plugins import named_reason
from befit.runs.directory import finished
from befit.runs.host import Host, shared
from befit.runs.loading import load_federation, weights_hashes
from befit.runs.provenance import read_manifest
from befit.runs.runner import run
from befit.runs.shared_stages import SharedFolder, forget_shared_stages, repeated_keys, shared_stages_keys
from befit.runs.workers import Worker
from befit.studies.compare.cells import StudyCell, find_folder
from befit.studies.compare.collect import Scores

Tell = Callable[[dict[str, Any]], None]
_ANEW = "compare in a new directory"


@dataclass(frozen=True)
class CellFailure:
    """A cell that has no results, and why."""

    label: str
    seed: int
    error: str
    traceback: str

    @property
    def diverged(self) -> bool:
        """Whether training came to numbers that are not finite, as it will again."""
        return any(kind in self.error for kind in DIVERGED)


def execute(
    cells: Sequence[StudyCell], out: Path, jobs: int, tell: Tell, kept: Mapping[str, Scores]
) -> list[CellFailure]:
    """Run every cell that has no results yet, `jobs` at a time; the failures.

    `kept` are the numbers of cells that another comparison has finished, by key.
    Tells `cell_started`, `cell_finished` and `cell_failed`, each with the cell's number, and with it every event of
    the run. A finished cell is never touched; an interrupted one goes on at its last checkpoint.
    """
    left, failed, same_data, same_weights = list[int](), dict[int, CellFailure](), _SameData(), _SameWeights()

    def fail(number: int, error: str) -> None:
        failed[number] = CellFailure(cells[number].label, cells[number].seed, error, "")
        tell({"kind": "cell_failed", "cell": number, "error": error})

    for number, cell in enumerate(cells):
        path = find_folder(out, cell)
        if (path / "report.html").exists() and (results := finished(path / "results.json")) is not None:
            manifest, mean, where = read_manifest(path), results["summary"]["mean"], str(path)
            partition, weights = manifest["data"].get("partition", {}).get("sha256"), manifest.get("weights", {})
            cure = _ANEW
        elif cell.key in kept:
            mean, where, cure = kept[cell.key].mean, f"{cell.label}, seed {cell.seed},", "compare without these --cells"
            partition, weights = kept[cell.key].partition, kept[cell.key].weights
        else:
            left.append(number)
            continue
        if not same_data(cell, partition):
            fail(number, f"RunError: {where} is of other data, which have changed since; {cure}")
        elif not same_weights(cell, weights):
            fail(number, f"RunError: {where} is of other weights of its model, which have changed since; {cure}")
        else:
            tell({"kind": "cell_finished", "cell": number, "mean": mean, "reused": True, "seconds": 0.0})
    shared_stages = _SharedStages(cells, left, out)
    if jobs == 1 or len(left) <= 1:
        failures = _here(cells, left, out, tell, shared_stages)
    else:
        failures = _Workers(cells, left, out, tell, shared_stages).run(min(jobs, len(left)))
    if not failures:
        forget_shared_stages(shared_stages.path, shared_stages.alike)
    done = {number: find_folder(out, cell) for number, cell in enumerate(cells)}
    done = {number: path for number, path in done.items() if (path / "report.html").exists()}
    same_weights = _SameWeights()  # they may have changed in the meantime
    for number, path in done.items():
        if number not in failed and not same_weights(cells[number], read_manifest(path).get("weights", {})):
            fail(number, f"RunError: {path} is of other weights of its model, which have changed; {_ANEW}")
        if reason := _without_a_model(path):
            fail(number, reason)
    return [*failed.values(), *failures]


def _without_a_model(path: Path) -> str:
    """Why no client of a finished run has a model that could be scored; empty where one has."""
    results = finished(path / "results.json") or {"failures": []}
    if not results["failures"] or results["summary"].get("mean") is not None:
        return ""
    first = next((each for each in results["failures"] if each["kind"] in DIVERGED), results["failures"][0])
    return f"{first['kind']}: {first['reason']}"


class _SameData:
    """Whether finished cells on files of one's own are of what these are now. Benchmarks are of a version."""

    def __init__(self) -> None:
        self._hashes: dict[str, str | None] = {}

    def __call__(self, cell: StudyCell, before: str | None) -> bool:
        values = to_dict(cell.experiment)
        if values.get("data") is None:
            return True
        decides = [values["data"], values["federation"]["seed"], values["privacy"]["unit"]]
        about = json.dumps(decides, sort_keys=True, default=str)
        if about not in self._hashes:
            try:
                self._hashes[about] = load_federation(cell.experiment).manifest.get("partition", {}).get("sha256")
            except (BefitError, OSError):  # they are elsewhere now, and the results stay
                self._hashes[about] = None
        return self._hashes[about] in (None, before)


class _SameWeights:
    """Whether finished cells are of the weights that their models have now. Where that was not noted, they are."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, str]] = {}

    def __call__(self, cell: StudyCell, before: Mapping[str, str]) -> bool:
        values = to_dict(cell.experiment)
        about = json.dumps([values.get(key) for key in ("model", "families", "common_model")], sort_keys=True)
        if about not in self._hashes:
            try:
                self._hashes[about] = weights_hashes(cell.experiment)
            except (BefitError, OSError):  # they are elsewhere now, and the results stay
                self._hashes[about] = {}
        now = self._hashes[about]
        return all(now.get(model, weights) == weights for model, weights in before.items())


class _SharedStages:
    """Which cells have the same stages, and where they leave and find what those come to."""

    def __init__(self, cells: Sequence[StudyCell], left: Sequence[int], out: Path) -> None:
        self.path = out / "shared_stages"
        keys = [list(_keys(cell.experiment)) for cell in cells]
        self.alike = repeated_keys(key for of_cell in keys for key in of_cell)  # finished cells may have left theirs
        self.keys = {number: shared for number in left if (shared := self.alike.intersection(keys[number]))}

    def folder(self, number: int) -> SharedFolder | None:
        return SharedFolder(self.path, self.keys[number]) if number in self.keys else None

    def missing(self, number: int) -> set[str]:
        """The keys of what another cell could make for this one, and has not made yet."""
        return {key for key in self.keys.get(number, ()) if not (self.path / key).exists()}


def _keys(experiment: Experiment) -> Iterator[str]:
    """Of the shared stages of a cell's method and of its baselines."""
    for block in experiment.blocks:
        yield from shared_stages_keys(experiment, block).values()


class Runner:
    """Runs one cell after the other, and keeps backbone and data from one to the next where they allow it."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def host(self, experiment: Experiment) -> Host:
        """The backbone and data of an experiment: those of the last cell, where they fit."""
        host, self._host = self._host, None  # after a failure there is none that could be trusted
        if host is None or shared(host.experiment) != shared(experiment):
            host = None  # the old backbone may go before the new one comes
            host = Host(experiment)
        self._host = host
        return host

    def __call__(
        self, cell: StudyCell, path: Path, observer: Tell, shared_stages: SharedFolder | None = None
    ) -> float | None:
        """The cell's mean over clients; `shared_stages` is the folder of shared stages. Raises whatever stopped it."""
        host, self._host = self.host(cell.experiment), None
        done = run(cell.experiment, out=path, resume=True, observer=observer, host=host, shared_stages=shared_stages)
        self._host = host
        return done.results["summary"].get("mean")


@dataclass
class _Progress:
    """What is told of the cells, and which of them failed, by number."""

    cells: Sequence[StudyCell]
    tell: Tell
    failed: dict[int, CellFailure] = field(default_factory=dict[int, CellFailure])
    began: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def failures(self) -> list[CellFailure]:
        """In the order of the cells, whichever ended first."""
        return [self.failed[number] for number in sorted(self.failed)]

    def start(self, number: int) -> None:
        self.began[number] = time.monotonic()
        self.tell({"kind": "cell_started", "cell": number})

    def finish(self, number: int, mean: float | None) -> None:
        took = time.monotonic() - self.began[number]
        self.tell({"kind": "cell_finished", "cell": number, "mean": mean, "reused": False, "seconds": took})

    def fail(self, number: int, error: str, trace: str) -> None:
        cell = self.cells[number]
        self.failed[number] = CellFailure(cell.label, cell.seed, error, trace)
        self.tell({"kind": "cell_failed", "cell": number, "error": error})


def _here(
    cells: Sequence[StudyCell], left: Sequence[int], out: Path, tell: Tell, shared_stages: _SharedStages
) -> list[CellFailure]:
    runner, progress = Runner(), _Progress(cells, tell)
    for number in left:
        progress.start(number)
        path = find_folder(out, cells[number])
        try:
            mean = runner(
                cells[number], path, lambda event, n=number: tell({**event, "cell": n}), shared_stages.folder(number)
            )
        except (Exception, SystemExit) as error:  # a plugin may end the process, and the other cells are not its own
            progress.fail(number, named_reason(error), traceback.format_exc())
        else:
            progress.finish(number, mean)
    return progress.failures


class _Workers:
    """Processes that run cells. One that dies is a failure of its cell; another takes its place.

    made    every worker, with what the backbone and data that it holds were made for
    places  of the workers among each other
    busy    by connection, a worker that runs a cell, and the cell's number
    """

    def __init__(
        self, cells: Sequence[StudyCell], left: Sequence[int], out: Path, tell: Tell, shared_stages: _SharedStages
    ) -> None:
        self._cells, self._waiting, self._out, self._shared_stages = cells, list(left), out, shared_stages
        self._progress, self._tell = _Progress(cells, tell), tell
        self._wanted = {number: shared(cells[number].experiment) for number in left}
        self._made: dict[Worker, Experiment | None] = {}
        self._places: dict[Worker, int] = {}
        self._busy: dict[Any, tuple[Worker, int]] = {}

    def run(self, jobs: int) -> list[CellFailure]:
        """All cells, in so many processes at a time; those that failed."""
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        limits = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
        try:
            for place in range(jobs):
                self._give(self._start(limits, place))
            while self._busy:
                for connection in wait(list(self._busy)):
                    worker, number = self._busy[connection]
                    if self._hear(worker, number):
                        del self._busy[connection]
                        if self._waiting:
                            self._give(worker if worker in self._made else self._start(limits, self._places[worker]))
        finally:
            for worker in self._made:
                worker.stop()
        return self._progress.failures

    def _start(self, limits: Mapping[str, str], place: int) -> Worker:
        # A run survives that its worker is killed, and one that is finished does not notice.
        worker = Worker("befit.studies.compare.jobs", limits)
        self._made[worker], self._places[worker] = None, place
        return worker

    def _give(self, worker: Worker) -> None:
        number = self._next_for(worker)
        self._waiting.remove(number)
        self._made[worker] = self._wanted[number]
        self._busy[worker.connection] = worker, number
        self._progress.start(number)
        cell, folder = self._cells[number], self._shared_stages.folder(number)
        stages = None if folder is None else {"path": str(folder.path), "keys": sorted(folder.keys or ())}
        task = {"label": cell.label, "seed": cell.seed, "key": cell.key, "experiment": to_dict(cell.experiment)}
        path = str(find_folder(self._out, cell))
        with contextlib.suppress(OSError):  # a process that is gone is noticed when it should answer
            worker.send({**task, "path": path, "shared_stages": stages, "worker": self._places[worker]})

    def _next_for(self, worker: Worker) -> int:
        """A cell that need not do what another does at this moment; then one whose backbone and data this worker has;
        then one whose no other worker has."""
        missing = self._shared_stages.missing
        making = {key for _, number in self._busy.values() for key in missing(number)}
        elsewhere = [made for other, made in self._made.items() if other is not worker]

        def order(number: int) -> tuple[bool, bool, bool]:
            wanted = self._wanted[number]
            busy = not making.isdisjoint(missing(number))
            return busy, wanted != self._made[worker], wanted in elsewhere

        return min(self._waiting, key=order)  # of equals the first

    def _hear(self, worker: Worker, number: int) -> bool:
        """Take the worker's next message; whether its cell has ended."""
        answer = worker.receive()
        message: dict[str, Any] = {"kind": "gone"} if answer is None else answer[0]
        if message["kind"] == "event":
            self._tell({**message["event"], "cell": number})
            return False
        if message["kind"] == "warning":
            logging.getLogger(message["logger"]).warning("%s", message["text"])
            return False
        if message["kind"] == "gone":
            self._progress.fail(number, f"its process ended with {worker.ending()}", "")
            del self._made[worker]
        elif message["kind"] == "failed":
            self._progress.fail(number, message["error"], message["traceback"])
        else:
            self._progress.finish(number, message["mean"])
        return True
