"""Processes for a site's messages that are there at once: forked from one that has loaded Flower before.

Flower starts `flwr-clientapp` anew for every message and gives it 30 s to report; on a site that is slower, it starts
the next one meanwhile, and no message is ever answered. This takes the place of Flower's SuperExec beside a SuperNode
that runs with `--isolation process`. It stands on parts of Flower that are the same in 1.41 and 1.42.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from befit.core.errors import ConfigError
from befit.core.storage import read_bytes

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess


def _processes() -> ForkServerContext:
    """Asked for when it is needed: Windows has no such processes."""
    return multiprocessing.get_context("forkserver")


def serve_messages(node: str, secret: Path | None = None) -> None:
    """Answer the messages of the SuperNode at `node`, HOST:PORT on this machine, until SIGTERM or SIGINT.

    secret  the SuperNode's --superexec-auth-secret-file; without one it gives its messages to whoever asks on this
            machine. Raises ConfigError where the file is empty, RunError where it cannot be read
    """
    shared = None if secret is None else read_bytes(secret)
    if shared == b"":
        raise ConfigError([f"{secret} is empty; make it with: head -c 32 /dev/urandom"], "--secret")
    superexec.get_executor = lambda *what, **how: Forks()  # which one there is, Flower lets nobody say
    superexec.run_superexec(runtime_api_address=node, insecure=True, superexec_auth_secret=shared)


class Forks:
    """Flower's executor of tasks: a fork for each."""

    def __init__(self) -> None:
        _processes().set_forkserver_preload(
            [__name__, "flwr.supernode.runtime.run_clientapp", "befit.flower.client_app"]
        )
        ensure_running()
        self._running: list[BaseProcess] = []

    def get_eligible_capacity(self, supported_task_types: set[TaskType], **how: Any) -> tuple[set[TaskType], set[str]]:
        return supported_task_types & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *what: Any, **how: Any) -> None:
        return

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        process = _processes().Process(target=_answer, args=(spec.runtime_api_address, spec.token, os.getpid()))
        process.start()
        self._running.append(process)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Let go of processes that have ended."""
        for process in self._running:
            process.join(0)
        self._running = [process for process in self._running if process.is_alive()]

    def close(self) -> None:
        return


def _answer(node: str, token: str, parent: int) -> None:
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    run_clientapp(node, token, insecure=True, parent_pid=parent)
