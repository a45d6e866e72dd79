"""Whose a run directory is: a new run's, the run's that is resumed, or somebody else's."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from befit.config.experiment import Experiment, load_experiment, to_dict, to_yaml
from befit.core.errors import RunError
from befit.core.plugins import plugin_hash
from befit.core.storage import atomic_write, check_folder, read_json, write_json
from befit.runs.host import Host

__all__ = [
    "check_directory",
    "deciding",
    "environment",
    "free_directory",
    "identify",
    "locked",
    "settings_hash",
    "stands_on",
]


def free_directory(name: str) -> Path:
    folder, number = Path("runs"), 1
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists() or not any(path.iterdir()):
            return path
        number += 1


def check_directory(path: Path, experiment: Experiment, resume: bool) -> None:
    """Raise RunError unless the experiment may use this directory. Writes nothing, so a refusal leaves no trace."""
    config = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; name a directory for the run")
    check_folder(path)
    if not config.exists():
        # Hidden files are a lock, or what a crash left of a first write: no run has begun here.
        if path.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise RunError(f"{path} is not empty and not a run: it has no config.yaml; name another directory")
        return
    if not resume:
        raise RunError(f"{path} already holds a run; resume it with --resume, or name another directory")
    before, now = (deciding(value) for value in (to_dict(load_experiment(config)), to_dict(experiment)))
    if different := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        raise RunError(
            f"{path} was started with another configuration; {', '.join(different)} differ. Resume it "
            f"with its own: befit run {config} --out {path} --resume"
        )


# Settings that came later, and what leaves the numbers as they were without them: such runs go on and are found again.
_LATER: Mapping[str, Mapping[str, Any]] = {
    "limit": {"rounds": None},
    "evaluate": {"wins": None, "by": None},
    "model": {"long_prompts": "refuse"},
    "data": {"public": None},
}


def deciding(values: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run: all but where and how often it is saved, and who is shown what.

    Of plugins it is what they say that counts, and not where they are: see `settings_hash` and `identify`.
    """
    others = ("checkpoint", "name", "plugins", "report", "trackers")
    kept = {key: value for key, value in values.items() if key not in others}
    kept |= {key: _as_before(key, kept[key]) for key in _LATER if isinstance(kept.get(key), dict)}
    if isinstance(families := kept.get("families"), dict):
        kept["families"] = {name: {**one, "model": _as_before("model", one["model"])} for name, one in families.items()}
    return kept


def _as_before(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    later = _LATER[name]
    return {key: value for key, value in block.items() if key not in later or value != later[key]}


def settings_hash(experiment: Experiment) -> str:
    """Hash of all that decides the numbers of a run (not its name, nor how often it is saved)."""
    values = deciding(to_dict(experiment))
    if experiment.plugins:
        values["plugins"] = sorted(map(plugin_hash, experiment.plugins))
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the directory for this process; raises RunError while another one has it. A crash lets go of it."""
    check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{path} is in use by another process that is still running") from None
        yield


def identify(path: Path, host: Host) -> None:
    """Write config.yaml, and run.json: what this run's numbers rest on.

    Raises RunError if a resumed run rests on something else.
    """
    now = _basis(host)
    if (path / "run.json").exists():
        old, new = _deciding_basis(read_json(path / "run.json")), _deciding_basis(now)
        if different := [key for key in new if old[key] != new[key]]:
            raise RunError(
                f"{path} was started on something else: {', '.join(different)} changed since. Start a new "
                "run, or bring back what it was started on"
            )
    if not (path / "config.yaml").exists():
        atomic_write(path / "config.yaml", to_yaml(host.experiment).encode())
    write_json(path / "run.json", now)


def stands_on(host: Host) -> dict[str, Any]:
    """What a run's numbers rest on beside its settings, in JSON's types: clients, their data and their weights."""
    return _deciding_basis(json.loads(json.dumps(_basis(host))))


def _basis(host: Host) -> dict[str, Any]:
    """All that is told of task, weights, clients and data."""
    return {
        "task": host.federation.task,
        "label_names": list(host.federation.label_names),
        "backbone": host.fingerprint,
        "backbones": {info.id: host.backbone_of(info.id).fingerprint for info in (*host.infos, *host.newcomers)},
        "common_model": host.common.fingerprint if host.experiment.common_model else None,
        "clients": [info.id for info in host.infos],
        "newcomers": [info.id for info in host.newcomers],
        "families": host.families,
        "data": dict(host.federation.manifest),
        "plugins": {name: plugin_hash(name) for name in host.experiment.plugins},
    }


def _deciding_basis(basis: Mapping[str, Any]) -> dict[str, Any]:
    """Of that, what decides the numbers of clients that train; newcomers come after them."""
    backbones = basis.get("backbones", {})
    return {
        **{key: basis.get(key) for key in ("task", "label_names", "backbone", "common_model", "clients")},
        "backbones": {client: backbones.get(client) for client in basis.get("clients", ())},
        "data": basis.get("data", {}).get("partition", {}).get("sha256"),
        "plugins": sorted(basis.get("plugins", {}).values()),
    }


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
