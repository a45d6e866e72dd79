"""A run whose clients are sites, over any link."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from befit.config.experiment import CheckpointSettings, Experiment, method_blocks, run_names
from befit.core.wire_form import Wire
from befit.cost.traffic import stage_traffic
from befit.flower.engine import Link, RemoteEngine, RemoteMemories, ask
from befit.flower.policy import method_of, settings_of
from befit.flower.remote_clients import Infos
from befit.protocol.secure.client import BOX
from befit.runs.host import Host
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.runner import Run, run

_LOG = logging.getLogger(__name__)


def hello(experiment: Experiment, name: str) -> bytes:
    """The question that a run called `name` begins with; a site answers who it is, or why it does not take part."""
    experiment = resolve_model(experiment)
    own, *baselines = (blocks := method_blocks(experiment))  # told in the order in which they are run
    methods = {label: method_of(blocks[label]) for label in (*baselines, own)}
    header = {"run": name, "label": "hello", "settings": settings_of(experiment), "methods": methods}
    return ask("hello", header, {})


def run_at_sites(
    experiment: Experiment,
    link: Link,
    name: str,
    host: Host,
    out: Path,
    resume: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Run an experiment into the directory `out`; see `befit.runs.runner.run`.

    name  the run's name at the sites, the same when it is resumed
    host  with clients that are elsewhere, see `befit.flower.remote_clients`
    """
    # A site can go back by one round, so the server must not have to go back by more.
    experiment = replace(resolve_model(experiment), checkpoint=CheckpointSettings(0.0))
    settings, infos = settings_of(experiment), Infos(host)
    if experiment.privacy.unit == "example":
        _LOG.info("no site is asked for scores: they have no noise, and privacy.unit is example")

    def engine(label: str, method: Mapping[str, Any]) -> tuple[RemoteEngine, RemoteMemories]:
        wire = host.wire(host.build(method))
        metric, most = host.task.metric, largest_reply(host, method)
        block, memories = method_of(method), RemoteMemories()
        labels = run_names(experiment)
        about = (name, label, settings, block, wire, metric, infos.examples, most, labels, memories)
        return RemoteEngine(link, infos, *about), memories

    return run(experiment, out=out, resume=resume, observer=observer, host=host, engines=engine)


def largest_reply(host: Host, block: Mapping[str, Any]) -> int:
    """The arrays of the largest reply that a method's stages declare, in bytes as they travel."""
    method = host.build(block)
    sums = host.experiment.federation.secure_sums is not None  # whose numbers have up to eight bytes
    wire = Wire() if sums else host.wire(method)
    shapes = [backbone.model.shapes for backbone in host.backbones.values()]
    stages = [stage for shape in shapes for stage in stage_traffic(method, method.layout.specs(shape), 1, wire)]
    most = max(sum(stage.up.values()) for stage in stages)
    return 2 * most + 64 + BOX * len(host.infos) if sums else most
