"""Worker processes that run cells. JSON over a pipe, nothing is pickled; a worker ends when its parent is gone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, load_experiment, to_dict
from befit.studies.compare.cells import Cell

__all__ = ["Worker"]


class Worker:
    """One process and the pipe to it. `holds` is what its backbone and data were made for."""

    def __init__(self, cores: int) -> None:
        self.connection, theirs = Pipe()
        self.holds: Experiment | None = None
        command = [sys.executable, "-m", "befit.studies.compare.jobs", str(theirs.fileno())]
        limits = {"OMP_NUM_THREADS": str(cores)} if "OMP_NUM_THREADS" not in os.environ else {}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **limits})
        theirs.close()

    def start(self, cell: Cell, path: Path, openings: Path | None = None) -> None:
        """Begin a cell. A process that is gone is noticed by `receive`."""
        task = {
            "label": cell.label,
            "seed": cell.seed,
            "key": cell.key,
            "experiment": to_dict(cell.experiment),
            "path": str(path),
            "openings": None if openings is None else str(openings),
        }
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(task).encode())

    def receive(self) -> dict[str, Any] | None:
        """What it tells next; None if it has ended."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self.connection.close()
        self._process.kill()  # a run survives that, and one that is finished does not notice
        self._process.wait()


def main() -> None:
    """Run cells until the parent closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    connection = Connection(int(sys.argv[1]))
    tasks: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        while True:
            try:
                tasks.put(json.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                os._exit(1)  # at once: the parent's successor may want the directory

    def tell(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message).encode())

    class Forward(logging.Handler):
        """Warnings go to the parent, which knows whether a live table is on the screen."""

        def emit(self, record: logging.LogRecord) -> None:
            tell({"kind": "warning", "logger": record.name, "text": record.getMessage()})

    threading.Thread(target=listen, daemon=True).start()
    logger = logging.getLogger("befit")
    logger.addHandler(Forward(logging.WARNING))
    logger.propagate = False
    from befit.studies.compare.execute import Runner, failure_text

    runner = Runner()
    while True:
        task = tasks.get()
        try:
            cell = Cell(task["label"], task["seed"], load_experiment(task["experiment"]), task["key"])
            openings = None if task["openings"] is None else Path(task["openings"])
            mean = runner(cell, Path(task["path"]), lambda event: tell({"kind": "event", "event": event}), openings)
        except Exception as error:
            tell({"kind": "failed", "error": failure_text(error), "traceback": traceback.format_exc()})
        else:
            tell({"kind": "done", "mean": mean})


if __name__ == "__main__":
    main()
