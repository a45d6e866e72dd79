"""A worker process that runs cells of a comparison, one after the other."""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from pathlib import Path
from typing import Any

from befit.runs.workers import parent, take_gpu


def main() -> None:
    """Run cells until the parent closes the pipe, or dies."""
    line = parent()
    tasks: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        while (message := line.receive()) is not None:
            tasks.put(message[0])
        os._exit(1)  # at once: the parent's successor may want the directory

    class Forward(logging.Handler):
        """Warnings go to the parent, which knows whether a live table is on the screen."""

        def emit(self, record: logging.LogRecord) -> None:
            line.send({"kind": "warning", "logger": record.name, "text": record.getMessage()})

    threading.Thread(target=listen, daemon=True).start()
    logger = logging.getLogger("befit")
    logger.addHandler(Forward(logging.WARNING))
    logger.propagate = False
    from befit.config.load import load_experiment
    from befit.core.plugins import named_reason
    from befit.runs.shared_stages import SharedFolder
    from befit.studies.compare.cells import StudyCell
    from befit.studies.compare.execute import Runner

    runner = Runner()
    while True:
        task = tasks.get()
        try:
            cell = StudyCell(task["label"], task["seed"], load_experiment(task["experiment"]), task["key"])
            take_gpu(task["worker"], cell.experiment.devices)
            folder = task["shared_stages"]
            shared_stages = None if folder is None else SharedFolder(Path(folder["path"]), set(folder["keys"]))
            mean = runner(
                cell, Path(task["path"]), lambda event: line.send({"kind": "event", "event": event}), shared_stages
            )
        except Exception as error:
            line.send({"kind": "failed", "error": named_reason(error), "traceback": traceback.format_exc()})
        else:
            line.send({"kind": "done", "mean": mean})


if __name__ == "__main__":
    main()
