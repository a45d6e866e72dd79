"""Cells become run directories: in this process or in several, each done once, and a failure stops no other."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from befit.core.storage import read_json
from befit.runs.host import Host
from befit.runs.runner import run, shared
from befit.runs.shared_stages import forget_openings, opening_key, shared_openings
from befit.studies.compare.cells import Cell
from befit.studies.compare.jobs import Worker

__all__ = ["CellFailure", "execute", "find_folder"]

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class CellFailure:
    """A cell that has no results, and why."""

    label: str
    seed: int
    error: str
    traceback: str


def find_folder(out: Path, cell: Cell) -> Path:
    """The cell's run directory: the one with its key, whatever its label was then, or where it will be."""
    found = sorted((out / "runs").glob(f"*-{cell.key}"))
    return found[0] if found else out / "runs" / cell.folder


def execute(cells: Sequence[Cell], out: Path, jobs: int, tell: Tell) -> list[CellFailure]:
    """Run every cell that has no results yet, `jobs` at a time; the failures.

    Tells `cell_started`, `cell_finished` and `cell_failed`, each with the cell's number, and with it every event of
    the run. A finished cell is never touched; an interrupted one goes on at its last checkpoint.
    """
    left: list[int] = []
    for number, cell in enumerate(cells):
        path = find_folder(out, cell)
        if (path / "report.html").exists():
            mean = read_json(path / "results.json")["summary"]["mean"]
            tell({"kind": "cell_finished", "cell": number, "mean": mean, "reused": True, "seconds": 0.0})
        else:
            left.append(number)
    openings = _Openings(cells, left, out)
    if jobs == 1 or len(left) <= 1:
        failures = _here(cells, left, out, tell, openings)
    else:
        failures = _in_workers(cells, left, out, min(jobs, len(left)), tell, openings)
    if not failures:
        forget_openings(openings.path, openings.alike)
    return failures


class _Openings:
    """Which cells begin with the same stages, and where they leave and find what those come to."""

    def __init__(self, cells: Sequence[Cell], left: Sequence[int], out: Path) -> None:
        self.path = out / "openings"
        keys = [opening_key(cell.experiment, cell.experiment.method) for cell in cells]
        self.alike = shared_openings(keys)  # of finished cells too: what they left may still be there
        self.keys = {number: key for number in left if (key := keys[number]) in self.alike}

    def folder(self, number: int) -> Path | None:
        return self.path if number in self.keys else None

    def missing(self, number: int) -> str | None:
        """The key of what another cell could make for this one, and has not made yet."""
        key = self.keys.get(number)
        return None if key is None or (self.path / key).exists() else key


class Runner:
    """Runs one cell after the other, and keeps backbone and data from one to the next where they allow it."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def __call__(self, cell: Cell, path: Path, observer: Tell, openings: Path | None = None) -> float | None:
        """The cell's mean over clients. `openings` is where cells share stages. Raises whatever stopped it."""
        host, self._host = self._host, None  # after a failure there is none that could be trusted
        if host is None or shared(host.experiment) != shared(cell.experiment):
            host = None  # the old backbone may go before the new one comes
            host = Host(cell.experiment)
        done = run(cell.experiment, out=path, resume=True, observer=observer, host=host, openings=openings)
        self._host = host
        return done.results["summary"].get("mean")


def _here(cells: Sequence[Cell], left: Sequence[int], out: Path, tell: Tell, openings: _Openings) -> list[CellFailure]:
    runner, failures = Runner(), list[CellFailure]()
    for number in left:
        cell, began = cells[number], time.monotonic()
        tell({"kind": "cell_started", "cell": number})
        try:
            mean = runner(
                cell,
                find_folder(out, cell),
                lambda event, n=number: tell({**event, "cell": n}),
                openings.folder(number),
            )
        except Exception as error:
            failures.append(CellFailure(cell.label, cell.seed, failure_text(error), traceback.format_exc()))
            tell({"kind": "cell_failed", "cell": number, "error": failures[-1].error})
        else:
            tell(
                {
                    "kind": "cell_finished",
                    "cell": number,
                    "mean": mean,
                    "reused": False,
                    "seconds": time.monotonic() - began,
                }
            )
    return failures


def _in_workers(
    cells: Sequence[Cell], left: Sequence[int], out: Path, jobs: int, tell: Tell, openings: _Openings
) -> list[CellFailure]:
    """The same in processes. A process that dies is one failure; another takes its place."""
    failures: list[CellFailure] = []
    waiting = list(left)
    cores = max(1, (os.cpu_count() or 1) // jobs)
    busy: dict[Any, tuple[Worker, int, float]] = {}
    workers: list[Worker] = []

    def give(worker: Worker) -> None:
        """The next cell: one that need not do what another does at this moment, then one with the worker's data."""
        making = {openings.missing(n) for _, n, _ in busy.values()} - {None}
        number = min(
            waiting,
            key=lambda n: (
                openings.missing(n) in making,
                shared(cells[n].experiment) != worker.holds,
                waiting.index(n),
            ),
        )
        waiting.remove(number)
        cell = cells[number]
        worker.holds = shared(cell.experiment)
        tell({"kind": "cell_started", "cell": number})
        busy[worker.connection] = (worker, number, time.monotonic())
        worker.start(cell, find_folder(out, cell), openings.folder(number))

    def failed(number: int, error: str, trace: str) -> None:
        failures.append(CellFailure(cells[number].label, cells[number].seed, error, trace))
        tell({"kind": "cell_failed", "cell": number, "error": error})

    try:
        for _ in range(jobs):
            workers.append(Worker(cores))
            give(workers[-1])
        while busy:
            for connection in wait(list(busy)):
                worker, number, began = busy[connection]
                message = worker.receive()
                if message is not None and message["kind"] == "event":
                    tell({**message["event"], "cell": number})
                    continue
                if message is not None and message["kind"] == "warning":
                    logging.getLogger(message["logger"]).warning("%s", message["text"])
                    continue
                del busy[connection]
                if message is None:
                    failed(number, f"its process ended with {worker.ending()}", "")
                    workers.remove(worker)
                    if waiting:
                        workers.append(worker := Worker(cores))
                elif message["kind"] == "failed":
                    failed(number, message["error"], message["traceback"])
                else:
                    tell(
                        {
                            "kind": "cell_finished",
                            "cell": number,
                            "mean": message["mean"],
                            "reused": False,
                            "seconds": time.monotonic() - began,
                        }
                    )
                if waiting:
                    give(worker)
    finally:
        for worker in workers:
            worker.stop()
    return failures


def failure_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
