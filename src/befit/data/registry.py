"""The benchmarks by name. A benchmark is a function whose signature is the schema of its block in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from befit.core.errors import ConfigError
from befit.core.plugins import not_returned
from befit.core.registry import Registry, check_name
from befit.core.schema import check_values, parameters_of
from befit.data.federation import Federation

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


BENCHMARKS: Registry[Benchmark] = Registry("benchmark", ("befit.data.offline", "befit.data.papers"), "befit.benchmarks")


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
    """Enter a function under `name`. Raises ValueError where another one has that name, and TypeError for a name that
    is no text."""
    check_name(name, "benchmark")

    def enter(builder: Builder) -> Builder:
        entry = Benchmark(name, version, summary, default_model, task, builder, families or {}, seeded)
        BENCHMARKS.enter(name, builder, entry)
        return builder

    return enter


def names() -> list[str]:
    """Names of all benchmarks, sorted. Reads no data and imports nothing heavy."""
    return BENCHMARKS.names()


def get(name: str) -> Benchmark:
    """The entry of one benchmark. Raises ConfigError with a suggestion."""
    return BENCHMARKS.find(name, "benchmark.name")


def build(name: str, version: str | None, arguments: Mapping[str, Any]) -> Federation:
    """Make the federation. Raises ConfigError for an unknown name, version or argument, all problems at once."""
    entry = get(name)
    values, problems = check_values(parameters_of(entry.build), arguments, "benchmark.", name)
    if version not in (None, entry.version):
        problems.append(f"benchmark.version: {name} is at version {entry.version} here, not {version}")
    if problems:
        raise ConfigError(problems, "the benchmark")
    built = entry.build(**values)
    if wrong := not_returned(entry.build, built, Federation):
        raise ConfigError([f"benchmark {name}: {wrong}"])
    return built
