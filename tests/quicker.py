"""What no process of the tests does, for the sake of speed: wait for the disk, load a shipped model twice, build the
skeleton of a built-in architecture twice, divide a shipped benchmark twice in the same way, and make the command line
twice."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from typer import testing

from befit.cost.architecture import Architecture, find_architecture
from befit.data import registry
from befit.data.federation import Federation
from befit.models import backbone
from befit.zoo import FOLDER

_load, _build, _skeleton = backbone._load, registry.build, Architecture.skeleton
_names = import_module("befit.data.offline.names")  # by its name, which in its package is the function in it
UNCHANGED = {FOLDER}  # folders whose models stay as they are as long as the process lives


def make_quicker() -> None:
    """Nothing waits for the disk, since no test cuts the power; and a model of the zoo, or of `tests.backbones`, is
    read from its files once in a process, and copied from then on. The tests of `befit.models` load models of their
    own, so from files each time. Nobody changes a skeleton. What a benchmark of `befit.data.offline` makes cannot be
    changed, so the next to ask for it has the same; its own tests call its function."""
    os.fsync = lambda handle: None
    backbone._load = _copied
    registry.build = _known
    Architecture.skeleton = _known_skeleton
    testing._get_command = cache(testing._get_command)  # a tenth of a second for each command that is called
    _names.split_pools = lru_cache(maxsize=2)(_names.split_pools)  # of the same strings, a third of a second each time


def _known_skeleton(self: Architecture, labels: int = 1) -> Any:
    if not self.source.startswith("the built-in architecture "):
        return _skeleton(self, labels)
    return _built_skeleton(self.name, self.task, labels)


@cache
def _built_skeleton(name: str, task: str, labels: int) -> Any:
    return _skeleton(find_architecture(name, task), labels)


def _known(name: str, version: str | None, arguments: Mapping[str, Any]) -> Federation:
    if not registry.get(name).build.__module__.startswith("befit.data.offline."):
        return _build(name, version, arguments)
    return _built(name, version, json.dumps(arguments, sort_keys=True))


@lru_cache(maxsize=64)
def _built(name: str, version: str | None, arguments: str) -> Federation:
    return _build(name, version, json.loads(arguments))


@cache
def _loaded(settings: Any, *others: Any) -> backbone.LoadedBackbone:
    return _load(settings, *others)


def _copied(
    settings: Any, task: str, label_names: Any, seed: int, device: Any, directory: Path, source: str
) -> backbone.LoadedBackbone:
    if directory.parent not in UNCHANGED:
        return _load(settings, task, label_names, seed, device, directory, source)
    found = _loaded(settings, task, tuple(label_names), seed, device, directory, source)
    return replace(found, model=copy.deepcopy(found.model))
