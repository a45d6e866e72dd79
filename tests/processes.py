"""Real processes for tests that kill or watch one, without the five seconds that a new Python spends on imports.

They are forked from a process that has imported `tests.preloaded` and done nothing else: no state of the test, and none
of another test, is in them. Whether `python -m befit` starts at all is for test_cli.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from befit.runs import workers

__all__ = ["PATIENCE", "Forked", "befit", "begin", "call", "fork_workers", "program"]

# Seconds until a test gives up on what is bound to happen: no test waits that long unless something hangs.
PATIENCE = 900

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
_ROOT = Path(__file__).parents[1]


def begin(
    target: Callable[..., None], *arguments: Any, cwd: Path | None = None, streams: Sequence[Connection] = ()
) -> BaseProcess:
    """Start a function of a module, with standard output and error into two pipes, or nowhere."""
    with contextlib.chdir(_ROOT):  # where Python 3.11 finds what is to be preloaded
        ensure_running()
    process = _CONTEXT.Process(target=_inside, args=(target, arguments, cwd, tuple(streams)))
    process.start()
    return process


def call(
    target: Callable[..., None], *arguments: Any, cwd: Path | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run it to its end: exit code (minus the signal that killed it) and what it wrote."""
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
    process = begin(target, *arguments, cwd=cwd, streams=[writer for _, writer in ends])
    for _, writer in ends:
        writer.close()
    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(_read, reader) for reader, _ in ends]
        process.join(timeout)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
    for reader, _ in ends:
        reader.close()
    if late:
        raise TimeoutError(f"{target.__name__}{arguments} took more than {timeout} s")
    out, err = (text.result() for text in texts)
    return subprocess.CompletedProcess((target.__name__, *arguments), process.exitcode or 0, out, err)


def _read(stream: Connection) -> str:
    parts: list[bytes] = []
    while part := os.read(stream.fileno(), 2**16):
        parts.append(part)
    return b"".join(parts).decode()


def _inside(
    target: Callable[..., None], arguments: tuple[Any, ...], cwd: Path | None, streams: tuple[Connection, ...]
) -> None:
    if streams:
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream.fileno(), number)
            stream.close()
    else:
        with open(os.devnull, "w") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
    if cwd is not None:
        os.chdir(cwd)
    target(*arguments)


def fork_workers(patch: pytest.MonkeyPatch, but: int = 0) -> list[Forked]:
    """Let worker processes of this one be forked too: those that were. That they start by their command is for
    test_processes.py.

    but  so many are started by their command, the first ones
    """
    started: list[Forked] = []
    popen, commanded = subprocess.Popen, iter(range(but))

    def start(*arguments: Any, **options: Any) -> Forked | subprocess.Popen[bytes]:
        if next(commanded, None) is not None:
            return popen(*arguments, **options)
        started.append(Forked(*arguments, **options))
        return started[-1]

    patch.setattr(workers, "subprocess", SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired))
    return started


class Forked:
    """As much of a `subprocess.Popen` as a worker needs."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str]) -> None:
        end = Connection(os.dup(pass_fds[0]))
        self._process = begin(_module, command[2], end, dict(env))
        end.close()
        self.kill = self._process.kill

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        return code


def _module(name: str, end: Connection, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = [name, str(end.fileno())]
    runpy.run_module(name, run_name="__main__")


def befit(*words: str) -> None:
    """The command `befit`."""
    from befit.cli.main import main

    sys.argv = ["befit", *words]
    main()


def program(text: str) -> None:
    """A program, as `python -c` runs it."""
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
