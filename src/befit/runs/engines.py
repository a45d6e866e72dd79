"""What runs the clients of a method: this process, workers beside it, or sites elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError
from befit.core.values import Failure, Payload, Tick
from befit.protocol.engine import Engine, Memories
from befit.protocol.method import Method
from befit.protocol.schedule import Schedule
from befit.runs.directory import RunDirectory
from befit.runs.fleets import Fleets
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.processes import MultiprocessEngine


class Remote(Engine, Protocol):
    """An engine whose clients are elsewhere. Their adapters are written where they are.

    export  has every client write its adapter; returns the failures of those that could not, by client, and of those
            that have chosen what they deploy the label of its run
    """

    def export(self, requests: Mapping[str, Payload], at: Tick) -> tuple[dict[str, Failure], dict[str, str]]: ...


Engines = Callable[[str, Mapping[str, Any]], tuple[Remote, Memories]]


def make_engine(
    host: Host,
    method: Method,
    config: Mapping[str, Any],
    directory: RunDirectory,
    cleanup: contextlib.ExitStack,
    fleets: Fleets,
) -> tuple[LocalEngine | MultiprocessEngine, Memories]:
    """One process or several, as the configuration says, and where the clients' memories are."""
    settings = host.experiment.engine
    workers = min(settings.workers, len(host.infos))
    if workers == 1:
        store = directory.store(settings.store == "memory")
        return LocalEngine.of(host, method, store, fleets), store
    engine = cleanup.enter_context(
        MultiprocessEngine(host.experiment, config, host.infos, directory.path / "state" / "clients", workers, fleets)
    )
    return engine, engine.store()


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Torch as a run takes it to be, whatever the caller has set around it: gradients, float32, no automatic casts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """This many threads for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_threads(host: Host) -> int:
    """As configured; else one thread for a small backbone, whose operations are too short to share, and torch's choice.

    A second thread gains nothing below some ten million parameters, and costs much on a machine that is busy.
    """
    wanted, cores = host.experiment.engine.threads, os.cpu_count() or 1
    if wanted is not None:
        if wanted > cores:
            raise ConfigError([f"engine.threads: {wanted} are more than the {cores} cores of this machine"])
        return wanted
    return 1 if host.model.is_small else torch.get_num_threads()


def schedule_of(experiment: Experiment) -> Schedule:
    """The rounds of an experiment: how many, with whom, and what is done with their replies."""
    federation, evaluate = experiment.federation, experiment.evaluate
    return Schedule(
        rounds=federation.rounds,
        seed=federation.seed,
        cohort=federation.cohort,
        min_replies=federation.min_replies,
        evaluate_every=evaluate.every,
        split=evaluate.split,
        guard=experiment.guard,
        max_weight=federation.max_weight,
        secure_sums=federation.secure_sums,
        spool_bytes=experiment.engine.spool_mib * 2**20,
        most_rounds=experiment.limit.rounds,
        patience=federation.patience,
        asynchronous=federation.asynchronous,
    )
