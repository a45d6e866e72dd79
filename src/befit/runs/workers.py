"""Worker processes on this machine and the pipe to each: JSON, and arrays as safetensors; nothing is pickled.

A worker is a module with a `main` that takes its `parent()`. It leaves when the parent closes the pipe, or is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from befit.core.garbage import collect_seldom

if TYPE_CHECKING:
    from torch import Tensor

    from befit.core.values import State


class PipeEnd:
    """One end of a pipe.

    connection  for `multiprocessing.connection.wait`
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> None:
        """Send values that JSON can hold, and arrays; all or nothing. Raises OSError where the other end is gone."""
        frames = [json.dumps({"header": header, "arrays": bool(arrays)}).encode()]
        if arrays:
            from befit.core.wire import to_bytes

            frames.append(to_bytes(arrays, {}))
        for frame in frames:
            self.connection.send_bytes(frame)

    def receive(self) -> tuple[dict[str, Any], State] | None:
        """What comes next; None if the other end is gone."""
        try:
            message = json.loads(self.connection.recv_bytes())
            data = self.connection.recv_bytes() if message["arrays"] else b""
        except (EOFError, OSError):
            return None
        if not data:
            return message["header"], {}
        from befit.core.wire import from_bytes

        return message["header"], from_bytes(data, "a frame between processes")[0]


class Worker(PipeEnd):
    """A process that runs a module, and this end of the pipe to it.

    patience  seconds that it has to leave by itself once it is stopped, before it is killed
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, patience: float = 0.0) -> None:
        ours, theirs = Pipe()
        super().__init__(ours)
        self._patience = patience
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **(environment or {})})
        theirs.close()

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self.connection.close()
        try:
            self._process.wait(timeout=self._patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def gpu_of(worker: int, gpus: int) -> int | None:
    """Which of the GPUs a worker takes where the configuration leaves it open: they take turns.

    >>> [gpu_of(worker, 2) for worker in range(3)], gpu_of(0, 0)
    ([0, 1, 0], None)
    """
    return worker % gpus if gpus else None


def take_gpu(worker: int, devices: Iterable[str]) -> None:
    """Let `cuda` without a number be this worker's GPU, in this process; nothing where no model is to be on one.

    devices  of the models that it is to hold, as the configuration has them
    """
    if not {"auto", "cuda"}.isdisjoint(devices):
        import torch

        if (gpu := gpu_of(worker, torch.cuda.device_count())) is not None:
            torch.cuda.set_device(gpu)


def parent() -> PipeEnd:
    """A worker's end of the pipe. Ctrl-C and a scheduler's SIGTERM are left to the parent, which then closes it."""
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    collect_seldom()
    return PipeEnd(Connection(int(sys.argv[1])))
