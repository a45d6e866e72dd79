"""The run directory: logs that only grow, and a checkpoint that names one consistent set of files.

    config.yaml      the resolved configuration          results.json  what came out
    env.json         versions and machine                report.md, report.html
    metrics.jsonl    numbers that repeat exactly         outbound.json what left each client
    ledger.jsonl     bytes, seconds, memory              clients/<id>/ adapters
    checkpoint.json  where to resume, with the files in state/ that belong to it

`checkpoint.json` is replaced atomically and is the only truth: a resumed run cuts the logs back to the lengths it
records and uses the state files it names. What a crash interrupted is done again, with the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from befit.core.errors import RunError
from befit.core.metrics import believable
from befit.core.storage import finite, read_bytes, read_json, write_json
from befit.protocol.engine import Checkpoint, Memories
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.outbound import Outbound

LOGS = ("metrics.jsonl", "ledger.jsonl")


class RunDirectory:
    """Reads and writes one run. `every_s` is the least time between two checkpoints; 0 writes one every round."""

    def __init__(self, path: Path, every_s: float = 10.0) -> None:
        self.path = path
        self._every_s = every_s
        self._logs: dict[str, IO[bytes]] = {}
        self._written_at = time.monotonic()
        self._serial = 0

    def store(self, resident: bool) -> ClientStore:
        return ClientStore(self.path / "state" / "clients", resident)

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.path / "checkpoint.json").exists()

    def log(self, name: str, line: dict[str, Any]) -> None:
        """Append one line to `metrics` or `ledger`."""
        data = json.dumps(finite(line), ensure_ascii=False).encode() + b"\n"
        try:
            self._open(f"{name}.jsonl").write(data)
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}.jsonl: {error.strerror}; resume with --resume") from error

    def read(self, name: str) -> list[dict[str, Any]]:
        """All lines of `metrics` or `ledger` so far."""
        return read_lines(self.path / f"{name}.jsonl")

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._logs:
            self.path.mkdir(parents=True, exist_ok=True)
            self._logs[name] = (self.path / name).open("ab")
        return self._logs[name]

    def due(self) -> bool:
        return time.monotonic() - self._written_at >= self._every_s

    def commit(self, point: Checkpoint, store: Memories, outbound: Outbound) -> None:
        """Make everything up to `point` durable. A crash before the last line leaves the checkpoint of before."""
        self._serial += 1
        server = f"server.{self._serial}.safetensors"
        write_payload(self.path / "state" / server, point.server)
        files = store.commit()
        lengths = {name: self._sync(name) for name in LOGS}
        write_json(
            self.path / "checkpoint.json",
            {
                "stage": point.stage,
                "round": point.round,
                "server": server,
                "serial": self._serial,
                "clients": files,
                "client_serial": store.serial,
                "lengths": lengths,
                "outbound": outbound.saved(),
            },
        )
        store.settle()
        for path in (self.path / "state").glob("server.*"):
            if path.name != server:
                path.unlink(missing_ok=True)
        self._written_at = time.monotonic()

    def _sync(self, name: str) -> int:
        file = self._open(name)
        try:
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}; resume with --resume") from error
        return file.tell()

    def restore(self, store: Memories) -> tuple[Checkpoint | None, Outbound]:
        """Go back to the last checkpoint, or to the start if there is none yet."""
        for litter in self.path.rglob(".*.tmp"):  # what a crash left of a write
            litter.unlink(missing_ok=True)
        path = self.path / "checkpoint.json"
        saved = read_json(path) if path.exists() else None
        lengths = dict.fromkeys(LOGS, 0) if saved is None else saved["lengths"]
        for name, length in lengths.items():
            self._cut(self.path / name, length)
        if saved is None:
            store.restore({}, 0)
            return None, Outbound()
        self._serial = saved["serial"]
        store.restore(saved["clients"], saved["client_serial"])
        server = read_payload(self.path / "state" / saved["server"])
        return Checkpoint(saved["stage"], saved["round"], server), Outbound(saved["outbound"])

    def _cut(self, path: Path, length: int) -> None:
        if not path.exists():
            if length:
                raise RunError(f"{path} is missing, so this run cannot be resumed")
            return
        if path.stat().st_size < length:
            raise RunError(f"{path} is shorter than its checkpoint says, so this run cannot be resumed")
        os.truncate(path, length)

    def close(self) -> None:
        for file in self._logs.values():
            with contextlib.suppress(OSError):  # the last checkpoint has flushed what a resumed run needs
                file.close()
        self._logs = {}


def last_checkpoint(path: Path) -> Checkpoint:
    """The last checkpoint of a run that no process is writing. Raises RunError if it is missing or incomplete."""
    file = path / "checkpoint.json"
    saved = read_json(file) if file.exists() else None
    if saved is None or not (path / "state" / saved["server"]).exists():
        raise RunError(f"{path} has no server state: checkpoint.json, or the file in state/ that it names, is missing")
    return Checkpoint(saved["stage"], saved["round"], read_payload(path / "state" / saved["server"]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a log."""
    lines = read_bytes(path).splitlines() if path.exists() else []
    return [json.loads(line, parse_float=believable) for line in lines]
