"""Worker processes on this machine and the pipe to each: JSON, and arrays as safetensors; nothing is pickled.

A worker is a module with a `main` that takes its `parent()`. It leaves when the parent closes the pipe, or is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from befit.core.values import State


class Line:
    """One end of a pipe.

    connection  for `multiprocessing.connection.wait`
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> None:
        """Send values that JSON can hold, and arrays. Raises OSError where the other end is gone."""
        self.connection.send_bytes(json.dumps({"header": header, "arrays": bool(arrays)}).encode())
        if arrays:
            from befit.core.wire import to_bytes

            self.connection.send_bytes(to_bytes(arrays, {}))

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


class Worker(Line):
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


def parent() -> Line:
    """A worker's end of the pipe. Ctrl-C and a scheduler's SIGTERM are left to the parent, which then closes it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return Line(Connection(int(sys.argv[1])))
