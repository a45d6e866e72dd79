"""A Flower federation whose programs are forked from one process that has imported Flower and befit.

Each import takes seconds, and a federation of two sites has a dozen programs. That their commands start at all, slow
tests of the other files hold; what the SuperLink and an executor start by themselves, they start here as there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.integration.flower_network import BIN, Network
from tests.processes import PATIENCE, begin

__all__ = ["ForkedNetwork"]

_IMPORTED = ("flwr.cli.app", "flwr.superlink.cli", "flwr.supernode.cli", "befit.flower.executor", "befit.flower.worker")


class ForkedNetwork(Network):
    """Use it as a `Network`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._line, theirs = Pipe()
        self._asked = 0
        begin(_nursery, theirs, self.environment())
        theirs.close()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._line.close()

    def start(self, name: str, command: Sequence[object], where: Path | None = None) -> None:
        log = str(self.folder / f"{name}.log")
        self.processes[name] = _Program(self._line, command, where or self.folder, log, log)  # type: ignore[assignment]

    def flwr(self, *arguments: str) -> str:
        self._asked += 1
        out, err = (self.folder / f"flwr-{self._asked}.{stream}" for stream in ("out", "err"))
        code = _Program(self._line, ["flwr", *arguments], self.folder, str(out), str(err)).wait()
        assert code == 0, out.read_text() + err.read_text()
        return out.read_text()


class _Program:
    """As much of a `subprocess.Popen` as a network needs."""

    def __init__(self, line: Connection, command: Sequence[object], where: Path, out: str, err: str) -> None:
        self._line = line
        self.pid: int = self._ask("start", [*map(str, command)], str(where), out, err)

    def poll(self) -> int | None:
        return self._ask("poll", self.pid)

    def wait(self, timeout: float = PATIENCE) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a program", timeout)
            time.sleep(0.02)
        return code

    def _ask(self, *question: Any) -> Any:
        self._line.send(question)
        return self._line.recv()


def _nursery(line: Connection, environment: Mapping[str, str]) -> None:
    """Start programs, and say whether they have ended, until the other end of the line is closed."""
    os.environ.update(environment)  # first: Flower reads parts of it when it is imported
    for module in _IMPORTED:
        import_module(module)
    started: dict[int, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            what, *values = line.recv()
            if what == "start":
                process = multiprocessing.get_context("fork").Process(target=_program, args=(line, *values))
                process.start()
                assert process.pid is not None
                started[process.pid] = process
                line.send(process.pid)
            else:
                line.send(started[values[0]].exitcode)
    os._exit(0)


def _program(line: Connection, command: Sequence[str], where: str, out: str, err: str) -> None:
    """`python -m MODULE …`, or a program of the environment's, as a session of its own."""
    line.close()
    os.setsid()
    os.chdir(where)
    for number, path in enumerate((out, err), start=1):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    first, *words = command
    if first == "python":
        _, module, *words = words
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__")
    else:
        sys.argv = [str(BIN / first), *words]
        (point,) = entry_points(group="console_scripts", name=first)
        point.load()()
