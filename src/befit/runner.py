"""Runs as a person asks for them: a configuration in, a directory with adapters, numbers and a report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from befit.claim import claim, environment, free_directory, identify
from befit.config import Experiment, load_experiment
from befit.deployed import export, predict, write_client
from befit.engine.guard import Guard
from befit.engine.local import LocalEngine
from befit.errors import ConfigError
from befit.evaluate.results import against_baselines, method_results
from befit.federate import Schedule, federate, final_download, stage_rounds
from befit.host import Host, check_needs
from befit.journal import Observer, RunJournal
from befit.method import Method
from befit.registry import build_method
from befit.rundir import RunDirectory
from befit.storage import read_json, write_json
from befit.types import Stage, Tick

__all__ = ["Run", "check", "export", "predict", "run"]


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, and the content of its results.json."""

    path: Path
    results: dict[str, Any]


def run(
    config: Experiment | Mapping[str, Any] | Path | str,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    host: Host | None = None,
) -> Run:
    """Federate, personalise, export and report.

    config    an experiment, its fields as a mapping, or the path of a YAML file
    out       the run directory; default runs/<name>, or the first of runs/<name>-2, … that is free
    resume    go on where `out` was interrupted, with bit-identical numbers; a finished run comes back as it is
    observer  called with an event (a dict with a "kind") whenever something happened
    host      the loaded experiment, for callers that run one more than once

    Raises ConfigError, DataError, ModelError for what the user can mend, RunError for a directory that cannot be used,
    NotEnoughReplies when too many clients failed.
    """
    experiment = load_experiment(config)
    path = free_directory(experiment.name) if out is None else Path(out)
    claim(path, experiment, resume)
    if resume and (path / "report.html").exists():
        return Run(path, read_json(path / "results.json"))
    name, *labels = numbered([experiment.method["name"], *(config["name"] for config in experiment.baselines)])
    configs = zip((name, *labels), (experiment.method, *experiment.baselines), strict=True)
    methods = {label: build_method(config) for label, config in configs}
    host = Host(experiment) if host is None else host
    problems = [p for label, m in methods.items() for p in check_needs(label, m, len(host.infos))]
    if problems:
        raise ConfigError(problems)
    torch.set_num_threads(pick_threads(host))
    identify(path, host)
    write_json(path / "env.json", environment(host))
    baselines = {
        label: run_method(host, methods[label], label, path / "baselines" / label, observer) for label in labels
    }
    results = run_method(host, methods[name], name, path, observer)
    write_results(path, host, name, results, baselines)
    from befit.report import write_report

    write_report(path)
    return Run(path, read_json(path / "results.json"))


def check(config: Experiment | Mapping[str, Any] | Path | str) -> dict[str, Any]:
    """Resolve an experiment without training it: parameters, bytes per round, memory; see `befit.cost.estimate`."""
    from befit.cost.estimate import estimate

    return estimate(load_experiment(config))


def run_method(host: Host, method: Method, label: str, path: Path, observer: Observer | None) -> dict[str, Any]:
    """Run one method in its directory, or finish it where it was interrupted, and return its own results."""
    done = path / "method.json"
    if done.exists():
        return read_json(done)
    experiment = host.experiment
    server_site = host.install(method)
    directory = RunDirectory(path, experiment.checkpoint.every_s)
    try:
        store = directory.store(experiment.engine.store == "memory")
        journal = RunJournal(directory, store, label, observer, resume=True)
        for info in host.infos if journal.resume() is None else ():
            journal.outbound.hello(info)
        engine = LocalEngine(
            method, host.infos, host.site, store, journal.outbound,
            wire=getattr(torch, experiment.wire.dtype),
            serialise=experiment.engine.serialise,
            eval_batch_size=experiment.evaluate.batch_size,
        )  # fmt: skip
        schedule = schedule_of(experiment)
        stages = [replace(stage, rounds=stage_rounds(stage, schedule.rounds)) for stage in method.plan()]
        listed = [{"name": stage.name, "rounds": stage.rounds} for stage in stages]
        journal.event({"kind": "run_started", "stages": listed, "clients": len(host.infos)})
        server = federate(method, engine, server_site, schedule, journal)
        at = Tick(stages[-1].name, stages[-1].rounds or 1, stages[-1].rounds or 1, schedule.seed)
        for info in host.infos:
            request = final_download(method, server, info, at)
            write_client(path / "clients" / info.id, engine.deployment(info.id, request, at), host, label, info.id)
    finally:
        directory.close()
    clients = [info.id for info in host.infos]
    examples = {info.id: info.num_examples for info in host.infos}
    results = method_results(path, clients, examples, host.task.metric, _curve_stages(stages))
    for client, row in results["clients"].items():
        row["adapter"] = f"clients/{client}/adapter"
    write_json(path / "outbound.json", journal.outbound.as_dict())
    write_json(done, results)
    journal.event({"kind": "run_finished", "mean": results["summary"]["mean"]})
    return results


def pick_threads(host: Host) -> int:
    """As configured; else one thread for a small backbone, whose operations are too short to share, and torch's choice.

    A second thread gains nothing below some ten million parameters, and costs much on a machine that is busy.
    """
    if host.experiment.engine.threads is not None:
        return host.experiment.engine.threads
    small = sum(parameter.numel() for parameter in host.model.backbone.parameters()) < 10_000_000
    return 1 if small else torch.get_num_threads()


def schedule_of(experiment: Experiment) -> Schedule:
    federation, evaluate, guard = experiment.federation, experiment.evaluate, experiment.guard
    return Schedule(
        rounds=federation.rounds,
        seed=federation.seed,
        cohort=federation.cohort,
        min_replies=federation.min_replies,
        evaluate_every=evaluate.every,
        split=evaluate.split,
        guard=Guard(guard.max_norm_ratio, guard.max_bytes),
    )


def _curve_stages(stages: Sequence[Stage]) -> list[str]:
    """The stage whose rounds are the curve's, then those after it: the federated one, or the first of all."""
    federated = [index for index, stage in enumerate(stages) if stage.uplink]
    return [stage.name for stage in stages[federated[0] if federated else 0 :]]


def write_results(
    path: Path, host: Host, name: str, results: dict[str, Any], baselines: Mapping[str, dict[str, Any]]
) -> None:
    """results.json of the whole run: the method, compared with its baselines."""
    metric = host.task.metric
    against_baselines(results, baselines, metric)
    curve, failures = results.pop("curve"), results.pop("failures")
    head = {
        "name": host.experiment.name, "method": name, "status": "complete", "task": host.federation.task,
        "model": host.experiment.model.id, "seed": host.experiment.federation.seed,
        "data": f"{host.federation.name} {host.federation.version}".strip(),
        "partition": host.federation.manifest.get("partition", {}), "metric": metric,
        "split": host.experiment.evaluate.split, "higher_is_better": True,
    }  # fmt: skip
    curves = {name: curve, **{label: other["curve"] for label, other in baselines.items()}}
    failures += [{**failure, "run": label} for label, other in baselines.items() for failure in other["failures"]]
    write_json(path / "results.json", {**head, **results, "curves": curves, "failures": failures})


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, numbered from their second appearance on.

    >>> numbered(["potara", "local", "potara"])
    ['potara', 'local', 'potara-2']
    """
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return labels
