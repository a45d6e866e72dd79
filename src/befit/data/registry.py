"""The benchmarks by name. A benchmark is a function whose signature is the schema of its block in a configuration."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from befit.core.errors import ConfigError, did_you_mean
from befit.core.plugins import load_entry_points, origin
from befit.core.schema import check_values, parameters_of
from befit.data.federation import Federation

__all__ = ["Benchmark", "benchmark", "build", "get", "names"]

Builder = Callable[..., Federation]


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    default_model  the backbone it uses unless a configuration names another
    families       backbones of some of its clients, by a pattern such as size=small, in that case too
    seeded         whether the seeds of a comparison are its seed too; those of the papers have one partition for all
    """

    name: str
    version: str
    summary: str
    default_model: str
    task: str
    build: Builder
    families: Mapping[str, str] = field(default_factory=dict[str, str])
    seeded: bool = True


_BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str,
    version: str,
    *,
    summary: str,
    default_model: str,
    task: str,
    families: Mapping[str, str] | None = None,
    seeded: bool = True,
) -> Callable[[Builder], Builder]:
    """Enter a function under `name`; see `Benchmark`. Raises ValueError where another function has that name."""

    def enter(builder: Builder) -> Builder:
        if not builder.__module__.startswith("befit."):
            names()  # so that it is the newcomer that is refused where befit has the name already
        known = _BENCHMARKS.get(name)
        if known and (known.build.__module__, known.build.__qualname__) != (builder.__module__, builder.__qualname__):
            raise ValueError(f"two benchmarks are called {name!r}: {origin(known.build)} and {origin(builder)}")
        _BENCHMARKS[name] = Benchmark(name, version, summary, default_model, task, builder, families or {}, seeded)
        return builder

    return enter


def names() -> list[str]:
    """Names of all benchmarks, sorted. Reads no data and imports nothing heavy."""
    for package in (import_module("befit.data.offline"), import_module("befit.data.papers")):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    load_entry_points("befit.benchmarks")
    return sorted(_BENCHMARKS)


def get(name: str) -> Benchmark:
    """The entry of one benchmark. Raises ConfigError with a suggestion."""
    known = names()
    if name not in _BENCHMARKS:
        raise ConfigError(
            [
                f"benchmark.name: unknown benchmark {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}. "
                "A benchmark in a file of your own is known once `plugins` or --import names the file"
            ]
        )
    return _BENCHMARKS[name]


def build(name: str, version: str | None, arguments: Mapping[str, Any]) -> Federation:
    """Make the federation. Raises ConfigError for an unknown name, version or argument, all problems at once."""
    entry = get(name)
    values, problems = check_values(parameters_of(entry.build), arguments, "benchmark.", name)
    if version not in (None, entry.version):
        problems.append(f"benchmark.version: {name} is at version {entry.version} here, not {version}")
    if problems:
        raise ConfigError(problems, "the benchmark")
    return entry.build(**values)
