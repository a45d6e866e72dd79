"""Ownership and provenance of a run directory: who may write there, and what its numbers come from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from befit.config.experiment import BENCHMARK_PATHS, Experiment, to_dict, to_yaml
from befit.config.load import experiment_from, read_source
from befit.core.errors import BefitError, ConfigError, Damaged, RunError
from befit.core.plugins import came_with, plugin_hash
from befit.core.schema import show
from befit.core.storage import atomic_write, check_folder, read_sealed, remove_litter, write_sealed
from befit.core.text import first_of
from befit.protocol.settings import PrivacySettings
from befit.runs.host import Host
from befit.runs.loading import load_federation, weights_hashes

# Keys that came when there were runs already, by block, each with what was done before.
LATER: Mapping[str, Mapping[str, Any]] = {
    "benchmark": {"streams": None},
    "train": {"epochs": None, "micro_batch": None, "loraplus_ratio": 1.0, "class_weights": "none", "dpo_beta": 0.1},
    "adapter": {"start": None},
    "wire": {"top_k": None},
    "data": {"partition": None, "hub": None, "missing": "refuse", "drop_duplicates": False},
    "evaluate": {"fold": 0},
    "federation": {"patience": None, "secure_sums": None, "asynchronous": None, "deploy_margin": 0.0},
    "privacy": asdict(PrivacySettings()),
}


def default_directory(name: str, resume: bool, root: Path = Path("runs")) -> Path:
    """`root/name`, or the first of `root/name-2` and so on where others hold results or are no run at all; for `resume`
    the last one that exists."""
    number, path = 1, root / name
    while (path / "results.json").exists() or _foreign(path):
        number, following = number + 1, root / f"{name}-{number + 1}"
        if resume and not following.exists():
            break
        path = following
    return path


def _foreign(path: Path) -> bool:
    """Whether something is there in which no run has begun. Hidden files are a lock, or what a crash left of a first
    write."""
    if not path.is_dir():
        return path.exists()
    return not (path / "config.yaml").exists() and any(not entry.name.startswith(".") for entry in path.iterdir())


def check_directory(path: Path, experiment: Experiment, resume: bool) -> None:
    """Raise RunError unless the experiment may use this directory. Writes nothing, so a refusal leaves no trace."""
    config = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; name a directory for the run")
    check_folder(path)
    if _foreign(path):
        raise RunError(f"{path} is not empty and not a run: it has no config.yaml; name another directory")
    if not config.exists():
        return
    if not resume:
        raise RunError(
            f"{path} already holds a run; resume it with --resume (in Python resume=True), or name another directory"
        )
    started = experiment_of(path)
    if (path / "run.json").exists() and read_manifest(path)["settings"] != _settings(started):
        raise Damaged(
            f"{config} is damaged, or was changed: it is not what this run was started with. Put it back from a "
            "copy, or start a new run"
        )
    before, now = (_wherever(result_affecting(to_dict(value))) for value in (started, experiment))
    if different := [*_changed(before, now)]:
        raise RunError(
            f"{path} was started with another configuration: {first_of(different, 3, '; ')}. Resume it "
            f"with its own: befit run {shlex.quote(str(config))} --out {shlex.quote(str(path))} --resume"
        )


def _changed(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """What differs between two configurations, key by key."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from _changed(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        places = isinstance(before, list) or isinstance(now, list)  # for which `_wherever` may have True
        was, is_now = ("one place for all" if places and value is True else show(value) for value in (before, now))
        yield f"{path} was {was} and is {is_now}"


_GONE = {"serialise": False}  # a key of engine that there was, as every run had it: their hashes stay


def result_affecting(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that affect a run's numbers: all but its name, how often it is saved, what is shown to whom, who a
    site's key belongs to, how long is waited for sites, and where replies wait.

    Plugins are left out: `settings_hash` and `identify` compare the content of their files instead of the paths. So are
    keys of `LATER` where they say what was done before there were any: runs from before are still the same runs.
    """
    others = ("checkpoint", "name", "plugins", "report", "trackers")
    waiting = ("keys", "deadline_s", "wait_s", "spool_mib")
    kept = {key: value for key, value in values.items() if key not in others}
    for block, later in LATER.items():
        if kept.get(block) is None:
            continue
        same = {key for key, usual in later.items() if values[block].get(key, usual) == usual}
        kept[block] = {key: value for key, value in values[block].items() if key not in same}
        if not kept[block]:
            del kept[block]  # a block that came later as a whole
    if divided := (kept.get("data") or {}).get("partition"):
        kept["data"]["partition"] = {key: value for key, value in divided.items() if value is not None}
    engine = {key: value for key, value in values["engine"].items() if key not in waiting}
    return {**kept, "engine": {**engine, **_GONE}}


def _wherever(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without where the data lie, but with whose they are: a run knows its data by their content, and they may
    be moved."""
    kept = dict(values)
    if data := kept.get("data"):
        places = {key: data[key] for key in ("clients", "newcomers", "public") if key in data}
        whose = {key: sorted(place) if isinstance(place, Mapping) else bool(place) for key, place in places.items()}
        kept["data"] = {**data, **whose}
    if benchmark := kept.get("benchmark"):
        kept["benchmark"] = {key: value for key, value in benchmark.items() if key not in BENCHMARK_PATHS}
    return kept


def _settings(experiment: Experiment) -> str:
    """Hash of the settings that affect a run's numbers, as its config.yaml has them, but for where its data lie."""
    text = json.dumps(_wherever(result_affecting(to_dict(experiment))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def settings_hash(experiment: Experiment) -> str:
    """Hash of the settings that affect a run's numbers, and of its plugins' files."""
    values = result_affecting(to_dict(experiment))
    if experiment.plugins:
        values["plugins"] = sorted(map(plugin_hash, experiment.plugins))
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


_HANDED_ON: ContextVar[frozenset[Path]] = ContextVar("directories locked for what follows", default=frozenset())


@contextlib.contextmanager
def locked(path: Path, hand_on: bool = False) -> Iterator[None]:
    """Lock the directory for this process, and remove what a crash left there of files that it was writing.

    hand_on  what is called within may lock it once more: it goes on with what the caller has begun

    Raises RunError while another process has it. A crash unlocks it.
    """
    check_folder(path)
    whole = path.resolve()
    if whole in _HANDED_ON.get():
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock", blocking=False).acquire()
    except Timeout:
        raise RunError(f"{path} is in use by another process that is still running") from None
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; name another folder") from error
    with lock:
        remove_litter(path)
        before = _HANDED_ON.set(_HANDED_ON.get() | ({whole} if hand_on else set()))
        try:
            yield
        finally:
            _HANDED_ON.reset(before)


def identify(path: Path, host: Host) -> None:
    """Write config.yaml, and run.json: the data, weights and kind of device that this run's numbers come from.
    config.yaml is written anew where the data have been moved.

    Raises RunError for a resumed run where any of these has changed.
    """
    now = _basis(host)
    if (path / "run.json").exists():
        _check_basis(path, now)
    begun = (path / "config.yaml").exists()
    if not begun or _places(experiment_of(path)) != _places(host.experiment):
        atomic_write(path / "config.yaml", to_yaml(host.experiment).encode())
    _write(path, host, now)


def _write(path: Path, host: Host, basis: Mapping[str, Any]) -> None:
    """run.json, beside a config.yaml that is there."""
    weights = weights_hashes(host.experiment) if host.has_weights else {}
    write_sealed(path / "run.json", {**basis, "weights": weights, "settings": _settings(experiment_of(path))})


def _places(experiment: Experiment) -> tuple[Any, ...]:
    data, benchmark = experiment.data, to_dict(experiment).get("benchmark") or {}
    files = () if data is None else (data.clients, data.newcomers, data.public)
    return *files, *(benchmark.get(key) for key in BENCHMARK_PATHS)


def identify_client(path: Path, experiment: Experiment, host: Host, client: str) -> None:
    """The same two files where one client's model of one method, that of the experiment, is all that is kept."""
    atomic_write(path / "config.yaml", to_yaml(experiment).encode())
    alone = {"clients": [client], "newcomers": [], "families": {client: host.families[client]}}
    _write(path, host, {**_basis(host), **alone})


def check_same(path: Path, host: Host) -> None:
    """Raise RunError where the data, weights, plugins or device of a run's numbers are not those of the host."""
    _check_basis(path, _basis(host))


def check_inputs(path: Path, experiment: Experiment) -> None:
    """Raise RunError where a plugin of a finished run, or a record of the user's own, is not what it was. Files that
    are gone, or can no longer be read, are passed over: the results stand without them."""
    now = {**read_manifest(path), "plugins": {name: plugin_hash(name) for name in experiment.plugins}}
    if experiment.data is not None:
        with contextlib.suppress(BefitError):
            now["data"] = dict(load_federation(experiment).manifest)
    _check_basis(path, now)


def _check_basis(path: Path, now: Mapping[str, Any]) -> None:
    before = read_manifest(path)
    old, new = _result_affecting_basis(before), _result_affecting_basis(now)
    if different := [key for key in new if old[key] != new[key]]:
        files = set(before["plugins"].values()) ^ set(now["plugins"].values())
        named = sorted({name for each in (before, now) for name, sha in each["plugins"].items() if sha in files})
        words = [f"plugins ({', '.join(named)})" if key == "plugins" and named else key for key in different]
        raise RunError(
            f"{path} was started with other data, weights, plugins or device: {', '.join(words)} changed since. "
            "Start a new run, or restore what it was started with"
        )


def experiment_of(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The configuration of a run directory.

    Raises ConfigError where it names a plugin that may have come with that directory: runs are passed on as data, and
    bring no code. A run itself writes whole paths, and names of modules.
    """
    values, folder, source, name = read_source(path / "config.yaml")
    named = values.get("plugins")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if foreign := next((name for name in names if came_with(name, path)), None):
        raise ConfigError(
            [
                f"plugins: {foreign} may have come with the run directory, and is not loaded from there; name its "
                "whole path elsewhere, or a module that is installed"
            ],
            source,
        )
    return experiment_from(values, folder, source, name, overrides)


def read_manifest(path: Path) -> dict[str, Any]:
    """run.json of a run directory. Raises Damaged, saying how to go on, where it is not as the run wrote it."""
    try:
        return read_sealed(path / "run.json")
    except Damaged as error:
        raise Damaged(
            f"{error}. Put it back from a copy; or, if data and model are those that the run began with, remove it and "
            "resume the run with --resume, which writes it again"
        ) from error


def data_and_weights(host: Host) -> dict[str, Any]:
    """The clients, data, weights, plugins and kind of device that a run's numbers come from, in JSON's types."""
    return _result_affecting_basis(json.loads(json.dumps(_basis(host))))


def _basis(host: Host) -> dict[str, Any]:
    """Task, weights, clients, data, plugins and kind of device, for run.json."""
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
        "device": host.model.device.type,
    }


def _result_affecting_basis(basis: Mapping[str, Any]) -> dict[str, Any]:
    """The part of it that affects the numbers of clients that train; newcomers come after them, and may be mended."""
    partition = basis["data"].get("partition", {})
    return {
        **{key: basis[key] for key in ("task", "label_names", "backbone", "common_model", "clients", "device")},
        "backbones": {client: basis["backbones"][client] for client in basis["clients"]},
        "data": partition.get("clients_sha256") or partition.get("sha256"),
        "plugins": sorted(basis["plugins"].values()),
    }


def environment(host: Host) -> dict[str, Any]:
    """Versions and machine, for env.json."""
    named = ("befit", "torch", "transformers", "peft", "safetensors", "datasets", "numpy", "scikit-learn")
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "packages": {name: _installed(name) for name in named},
        "threads": torch.get_num_threads(),
        "device": str(host.model.device),
        "gpu": torch.cuda.get_device_name(host.model.device) if host.model.device.type == "cuda" else None,
    }


@cache
def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
