"""The run directory: logs that only grow, and a checkpoint that names one consistent set of files.

    config.yaml      the resolved configuration          results.json  what came out
    env.json         versions and machine                report.md, report.html
    metrics.jsonl    numbers that repeat exactly         outbound.json what left each client
    ledger.jsonl     bytes, seconds, memory              clients/<id>/ adapters
    checkpoint.json  where to resume, with the files in state/ that belong to it

`checkpoint.json` is replaced atomically and is the only truth: a resumed run cuts the logs back to the lengths it
records and uses the state files it names. What a crash interrupted is done again, with the same numbers.

Every file and every line that a run goes on from has a checksum. While a method runs, `checkpoint.previous.json` and
its files are kept as well: where something of the last checkpoint is missing or damaged, the run goes on from that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from befit.core.errors import Damaged, RunError
from befit.core.storage import log_line, read_lines, read_sealed, write_sealed
from befit.core.values import Payload
from befit.protocol.engine import Best, Checkpoint, Memories
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.outbound import Outbound

LOGS = ("metrics.jsonl", "ledger.jsonl")
METHOD_RESULTS = "method.json"  # in the folder of each method of a run
_FLIGHTS = "in flight"  # beside the server's memory, who is at work and from what
_LOG = logging.getLogger(__name__)


class RunDirectory:
    """Reads and writes one run. `every_s` is the least time between two checkpoints; 0 writes one every round.

    notes  what else goes on from a checkpoint, as JSON can hold it
    """

    def __init__(self, path: Path, every_s: float = 10.0) -> None:
        self.path = path
        self._every_s = every_s
        self._logs: dict[str, IO[bytes]] = {}
        self._written_at = time.monotonic()
        self._serial = 0
        self.notes: dict[str, Any] = {}
        self._servers: list[set[str]] = []  # files of the server's state by checkpoint, those of the last one at last
        self._best: dict[str, Any] | None = None  # what a checkpoint has of the best round: its fields, and files
        self._last, self._previous = path / "checkpoint.json", path / "checkpoint.previous.json"

    def store(self, resident: bool) -> ClientStore:
        return ClientStore(self.path / "state" / "clients", resident)

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._last.exists() or self._previous.exists()

    def log(self, name: str, line: dict[str, Any]) -> None:
        """Append one line to `metrics` or `ledger`."""
        try:
            self._open(f"{name}.jsonl").write(log_line(line))
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}.jsonl: {error.strerror}; resume with --resume") from error

    def read(self, name: str) -> list[dict[str, Any]]:
        """All lines of `metrics` or `ledger` so far."""
        if (log := self._logs.get(f"{name}.jsonl")) is not None:
            log.flush()
        return read_lines(self.path / f"{name}.jsonl")

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._logs:
            self.path.mkdir(parents=True, exist_ok=True)
            self._logs[name] = (self.path / name).open("ab")
        return self._logs[name]

    def due(self) -> bool:
        return time.monotonic() - self._written_at >= self._every_s

    def commit(self, point: Checkpoint, store: Memories, outbound: Outbound) -> None:
        """Make everything up to `point` durable. A crash before that is done leaves the checkpoint of before."""
        self._serial += 1
        server = f"server.{self._serial}.safetensors"
        flights = {} if point.flights is None else {_FLIGHTS: point.flights}
        write_payload(self.path / "state" / server, point.server | Payload.of_parts(flights))
        files = store.commit()
        if point.best is None:
            self._best = None
        elif point.best.back:
            self._best = {**(self._best or {}), **asdict(point.best)}
        elif (point.best.stage, point.best.round) == (point.stage, point.round):
            self._best = {**asdict(point.best), "server": server, "clients": files}
        store.hold({} if self._best is None else self._best["clients"], point.best)
        lengths = {name: self._sync(name) for name in LOGS}
        if self._last.exists():
            os.replace(self._last, self._previous)
        write_sealed(
            self._last,
            {
                "stage": point.stage,
                "round": point.round,
                "server": server,
                "serial": self._serial,
                "clients": files,
                **({} if self._best is None else {"best": self._best}),
                "client_serial": store.serial,
                "lengths": lengths,
                "outbound": outbound.saved(),
                "notes": self.notes,
                **({} if point.clip is None else {"clip": point.clip}),
            },
        )
        self._servers.append({server} if self._best is None else {server, self._best["server"]})
        self._settle(store, 2)
        self._written_at = time.monotonic()

    def forget_previous(self, store: Memories) -> None:
        """Keep the last checkpoint alone: nothing comes after it."""
        self._previous.unlink(missing_ok=True)
        self._settle(store, 1)

    def _settle(self, store: Memories, generations: int) -> None:
        """Remove what only older checkpoints name."""
        self._servers = self._servers[-generations:]
        for path in (self.path / "state").glob("server.*"):
            if not any(path.name in named for named in self._servers):
                path.unlink(missing_ok=True)
        store.settle()

    def _sync(self, name: str) -> int:
        file = self._open(name)
        try:
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}; resume with --resume") from error
        return file.tell()

    def restore(self, store: Memories) -> tuple[Checkpoint | None, Outbound]:
        """Go back to the last checkpoint that is whole, or to the start if there is none yet.

        Raises Damaged, saying how to go on, where neither the last one nor the one before is whole.
        """
        problems = []
        for name in LOGS:  # a directory that somebody passed on may name files of this machine, and logs are cut here
            if (self.path / name).is_symlink():
                raise Damaged(f"{self.path / name} is a link, and a run's log is a file of its own; remove the link")
        for path in (self._last, self._previous):
            try:
                restored = self._restore(path, store) if path.exists() else None
            except Damaged as problem:
                problems.append(str(problem))
                continue
            if restored is None:
                continue
            if path == self._last:
                self._previous.unlink(missing_ok=True)
            else:
                os.replace(path, self._last)
            self._settle(store, 1)
            for problem in problems:
                _LOG.warning("%s; the run goes on from the checkpoint before it, with the same numbers", problem)
            return restored
        if problems:
            raise Damaged(
                f"{'; '.join(dict.fromkeys(problems))}. No earlier checkpoint is whole: put the file back from a "
                f"copy, or remove {self._last} and {self._previous.name} beside it, and --resume begins from the "
                "first round"
            )
        for name in LOGS:
            if (self.path / name).exists():
                os.truncate(self.path / name, 0)
        store.restore({}, 0)
        self._settle(store, 1)
        return None, Outbound()

    def _restore(self, path: Path, store: Memories) -> tuple[Checkpoint, Outbound]:
        """What a checkpoint names, all of it read before anything is removed."""
        saved = read_sealed(path)
        server = read_payload(self.path / "state" / saved["server"])
        for name, length in saved["lengths"].items():
            read_lines(self.path / name, length)
        store.restore(saved["clients"], saved["client_serial"])
        for name, length in saved["lengths"].items():
            os.truncate(self.path / name, length)
        best = self._best = saved.get("best")
        point = None if best is None else Best(**{name: best[name] for name in asdict(Best(0, 0, 0.0))})
        store.hold({} if best is None else best["clients"], point)
        self._serial, self._servers = (
            saved["serial"],
            [{saved["server"]} if best is None else {saved["server"], best["server"]}],
        )
        self.notes.clear()
        self.notes.update(saved["notes"])
        flights, outbound = server.take_part(_FLIGHTS), Outbound(saved["outbound"])
        flights = flights if flights.scalars else None
        return Checkpoint(saved["stage"], saved["round"], server, point, saved.get("clip"), flights), outbound

    def back(self, store: Memories) -> Payload:
        """Take up what the checkpoints hold of the best round, at clients too; returns the server's memory. The logs
        and the last checkpoint stay as they are. Raises Damaged where a file of it is not whole."""
        assert self._best is not None
        store.restore(self._best["clients"], store.serial)
        return read_payload(self.path / "state" / self._best["server"])

    def close(self) -> None:
        for file in self._logs.values():
            with contextlib.suppress(OSError):  # the last checkpoint has flushed what a resumed run needs
                file.close()
        self._logs = {}


def finished(path: Path) -> dict[str, Any] | None:
    """Results that are written once they are known; None where there are none yet, or where the file is damaged: they
    are then made again."""
    try:
        return read_sealed(path) if path.exists() else None
    except Damaged as problem:
        _LOG.warning("%s; it is made again", problem)
        return None


def last_checkpoint(path: Path) -> Checkpoint:
    """The last checkpoint of a run that no process is writing. Raises Damaged if it is missing or not whole."""
    saved = read_sealed(path / "checkpoint.json")
    server = read_payload(path / "state" / saved["server"])
    server.take_part(_FLIGHTS)
    return Checkpoint(saved["stage"], saved["round"], server)
