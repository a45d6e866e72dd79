"""Runs as a person asks for them: a configuration in, a directory with adapters, numbers and a report out."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from befit.adapters.peft_io import write_adapter
from befit.config import Experiment, load_experiment, to_dict, to_yaml
from befit.engine.guard import Guard
from befit.engine.local import LocalEngine
from befit.engine.wire import from_bytes, to_bytes
from befit.errors import ConfigError, RunError, did_you_mean
from befit.evaluate.results import against_baselines, method_results
from befit.federate import Schedule, federate, final_download, stage_rounds
from befit.host import Host, check_needs
from befit.journal import Observer, RunJournal
from befit.method import Deployment, Method
from befit.registry import build_method
from befit.rundir import RunDirectory
from befit.storage import atomic_write, read_bytes, read_json, write_json
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
    path = _free_directory(experiment.name) if out is None else Path(out)
    _claim(path, experiment, resume)
    if resume and (path / "results.json").exists():
        return Run(path, read_json(path / "results.json"))
    methods = {"": build_method(experiment.method)}
    labels = _labels(experiment.baselines)
    methods |= {label: build_method(config) for label, config in zip(labels, experiment.baselines, strict=True)}
    host = Host(experiment) if host is None else host
    problems = [p for name, m in methods.items() for p in check_needs(name or "method", m, len(host.infos))]
    if problems:
        raise ConfigError(problems)
    torch.set_num_threads(pick_threads(host))
    write_json(path / "env.json", environment(host))
    write_json(path / "run.json", {
        "task": host.federation.task, "label_names": list(host.federation.label_names),
        "partition": host.federation.manifest, "backbone": host.fingerprint,
        "clients": [info.id for info in host.infos],
    })  # fmt: skip
    baselines = {
        label: run_method(host, methods[label], label, path / "baselines" / label, observer) for label in labels
    }
    name = experiment.method["name"]
    results = run_method(host, methods[""], name, path, observer)
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
            _export(path / "clients" / info.id, engine.deployment(info.id, request, at), host, label, info.id)
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


def _labels(baselines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each baseline, numbered where a method appears twice."""
    labels: list[str] = []
    for config in baselines:
        name = config["name"]
        count = sum(label.split("-")[0] == name for label in labels)
        labels.append(name if not count else f"{name}-{count + 1}")
    return labels


def _free_directory(name: str) -> Path:
    folder, number = Path("runs"), 1
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists() or not any(path.iterdir()):
            return path
        number += 1


def _claim(path: Path, experiment: Experiment, resume: bool) -> None:
    """Make the directory this experiment's, or refuse: it is in use, or holds a run of another configuration."""
    config = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; name a directory for the run")
    if resume and not config.exists():
        if path.exists() and any(not p.name.startswith(".config.yaml") for p in path.iterdir()):
            raise RunError(f"{path} has no config.yaml: it is not a run directory")
    elif config.exists():
        if not resume:
            raise RunError(f"{path} already holds a run; resume it with --resume, or name another directory")
        before, now = (_deciding(value) for value in (to_dict(load_experiment(config)), to_dict(experiment)))
        if different := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            raise RunError(f"{path} was started with another configuration; {', '.join(different)} differ. Resume it "
                           f"with its own: befit run {config} --out {path} --resume")  # fmt: skip
        return
    elif path.exists() and any(path.iterdir()):
        raise RunError(f"{path} is not empty and not a run; name another directory")
    atomic_write(config, to_yaml(experiment).encode())


def _deciding(values: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run: all but where and how often it is saved."""
    return {key: value for key, value in values.items() if key not in ("checkpoint", "name")}


def environment(host: Host) -> dict[str, Any]:
    """Versions and machine, for env.json."""
    packages = {}
    for name in ("befit", "torch", "transformers", "peft", "safetensors", "datasets", "numpy", "scikit-learn"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "packages": packages,
        "threads": torch.get_num_threads(),
        "device": str(host.model.device),
        "gpu": torch.cuda.get_device_name(host.model.device) if host.model.device.type == "cuda" else None,
    }


def _export(folder: Path, deployed: Deployment, host: Host, method: str, client: str) -> None:
    """The client's model: a PEFT checkpoint, and the deployment in full for `befit predict`."""
    note = f"Trained by the befit method {method} for client {client} of {host.federation.name}."
    write_adapter(
        folder / "adapter", deployed, host.model, base=host.experiment.model.id, task=host.federation.task, note=note
    )
    # One entry of metadata: the library writes several in a random order, and equal runs should be equal files.
    use = json.dumps({"slots": deployed.slots, "mixer": deployed.mixer})
    atomic_write(folder / "deployment.safetensors", to_bytes(deployed.arrays, {"use": use}))


def export(run_dir: Path | str, client: str, out: Path | str) -> Path:
    """Copy one client's PEFT adapter to `out`, which must not hold anything else. Returns `out`.

    Raises RunError for a directory without a finished run, an unknown client, or a folder in use.
    """
    source = _client_folder(Path(run_dir), client) / "adapter"
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{target} exists already and is not an empty folder; name another")
    for file in sorted(source.iterdir()):
        atomic_write(target / file.name, read_bytes(file))
    return target


def predict(run_dir: Path | str, client: str, inputs: Sequence[Any]) -> list[dict[str, Any]]:
    """What the client's own model says to each input: a text, or the path of an image."""
    from befit.host import load_model

    folder = _client_folder(Path(run_dir), client)
    manifest = read_json(Path(run_dir) / "run.json")
    experiment = load_experiment(Path(run_dir) / "config.yaml")
    model, task, fingerprint = load_model(experiment, manifest["task"], manifest["label_names"])
    if fingerprint != manifest["backbone"]:
        raise RunError(f"the model {experiment.model.id} is not the one that {run_dir} was trained on: its fingerprint "
                       f"is {fingerprint[:12]}, the run's {manifest['backbone'][:12]}")  # fmt: skip
    model.install(build_method(experiment.method).layout, experiment.federation.seed)
    path = folder / "deployment.safetensors"
    arrays, metadata = from_bytes(read_bytes(path), str(path))
    model.load(arrays)
    use = json.loads(metadata["use"])
    with model.active(*use["slots"], mixer=use["mixer"]):
        return task.predict(model.backbone, inputs)


def _client_folder(run_dir: Path, client: str) -> Path:
    if not (run_dir / "run.json").exists():
        raise RunError(f"{run_dir} is not a run directory: it has no run.json")
    known = read_json(run_dir / "run.json")["clients"]
    if client not in known:
        raise RunError(f"{run_dir} has no client {client!r}; it has {', '.join(known[:20])}"
                       f"{', …' if len(known) > 20 else ''}.{did_you_mean(client, known)}")  # fmt: skip
    folder = run_dir / "clients" / client
    if not (folder / "deployment.safetensors").exists():
        raise RunError(f"{run_dir} is not finished: client {client} has no adapter yet. Go on with --resume")
    return folder
