"""Whose a run directory is: a new run's, the run's that is resumed, or somebody else's."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from befit.config import Experiment, load_experiment, to_dict, to_yaml
from befit.errors import RunError
from befit.host import Host
from befit.storage import atomic_write, read_json, write_json

__all__ = ["claim", "environment", "free_directory", "identify"]


def free_directory(name: str) -> Path:
    folder, number = Path("runs"), 1
    while True:
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists() or not any(path.iterdir()):
            return path
        number += 1


def claim(path: Path, experiment: Experiment, resume: bool) -> None:
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


def identify(path: Path, host: Host) -> None:
    """Write run.json: what this run's numbers rest on. Raises RunError if a resumed run rests on something else."""
    now = {
        "task": host.federation.task,
        "label_names": list(host.federation.label_names),
        "backbone": host.fingerprint,
        "clients": [info.id for info in host.infos],
        "data": dict(host.federation.manifest),
    }
    if (path / "run.json").exists():
        before = read_json(path / "run.json")
        parts = {key: (before.get(key), now[key]) for key in ("task", "label_names", "backbone", "clients")}
        parts["data"] = tuple(one.get("partition", {}).get("sha256") for one in (before.get("data", {}), now["data"]))  # type: ignore[union-attr,assignment]
        if different := [key for key, (old, new) in parts.items() if old != new]:
            raise RunError(f"{path} was started on something else: {', '.join(different)} changed since. Start a new "
                           "run, or bring back what it was started on")  # fmt: skip
    write_json(path / "run.json", now)


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
