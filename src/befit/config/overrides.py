"""Dotted overrides of a configuration: `train.lr=1e-3`, `method=fedsa`, `baselines.0.rank=4`."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError
from befit.core.schema import show
from befit.core.yamlfile import parse_yaml


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write each override into `values`; the problems found, one line each.

    Whether a key exists is decided when the whole is checked, so that an unknown one is named with a suggestion there.
    """
    problems: list[str] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            problems.append(f'"{override}": must be key=value, such as train.lr=1e-3')
            continue
        try:
            value = copy.deepcopy(_parsed(text, f"the override {path}"))
        except ConfigError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
            continue
        if problem := put(values, path.split("."), value):
            problems.append(f"{path}: {problem}")
    return problems


@lru_cache(maxsize=256)
def _parsed(text: str, where: str) -> Any:
    """Remembered: the overrides of a study are those of each of its cells."""
    return parse_yaml(text, where)


def put(values: dict[str, Any], path: Sequence[str], value: Any) -> str:
    """Set one value in nested mappings and lists, in place; why it cannot be set, or nothing."""
    *parents, last = path
    here: Any = values
    done: list[str] = []
    for key, following in zip(parents, path[1:], strict=True):
        inner, problem = _get(here, key, ".".join(done))
        if problem:
            return problem
        if inner is None:
            inner = {}
        elif isinstance(inner, str) and (done or key in ("method", "benchmark")):
            inner = {"name": inner}  # `method: fedit` is short for {name: fedit}
        if not isinstance(inner, (dict, list)):
            return f"{'.'.join([*done, key])} is {inner!r}, which has no {following}"
        here[int(key) if isinstance(here, list) else key] = inner
        here = inner
        done.append(key)
    _, problem = _get(here, last, ".".join(done))
    if not problem:
        here[int(last) if isinstance(here, list) else last] = value
    return problem


def _get(here: dict[str, Any] | list[Any], key: str, where: str) -> tuple[Any, str]:
    if isinstance(here, dict):
        return here.get(key), ""
    if not key.isdecimal() or int(key) >= len(here):
        return None, f"{where} has entries 0 to {len(here) - 1}, not {key}" if here else f"{where} is empty"
    return here[int(key)], ""


def seeded(experiment: Experiment, seeds: Sequence[int] | None) -> list[Experiment]:
    """The experiment for each seed; without seeds, as it is."""
    return [experiment] if seeds is None else [with_seed(experiment, seed) for seed in seeds]


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with one seed for adapters, cohorts and batches, and for a benchmark's partition if that has one.

    The benchmarks of the papers keep theirs, since their seeds of training and of the partition are independent.
    """
    changed = replace(experiment, federation=replace(experiment.federation, seed=seed))
    if changed.benchmark is not None:
        from befit.core.schema import parameters_of
        from befit.data.registry import get

        entry = get(changed.benchmark.name)
        if entry.seeded and "seed" in {parameter.name for parameter in parameters_of(entry.build)}:
            arguments = {**changed.benchmark.arguments, "seed": seed}
            changed = replace(changed, benchmark=replace(changed.benchmark, arguments=arguments))
    return changed


def seeds_problem(seeds: Any) -> str:
    """What is wrong with seeds, in words after "seeds: "; nothing where they are different whole numbers from 0.

    >>> seeds_problem([0, 1]), seeds_problem([1, 1])
    ('', 'must be different whole numbers from 0, such as [0, 1, 2], got [1, 1]')
    """
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in listed)
    if whole and listed and len(set(listed)) == len(listed):
        return ""
    return f"must be different whole numbers from 0, such as [0, 1, 2], got {show(listed or seeds)}"


_MOST_SEEDS = 10_000  # in one range; more are a slip of the keyboard


def parse_seeds(text: str | None) -> list[int] | None:
    """`--seeds 0-2,7` as numbers; None where it is not given.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    if text is None:
        return None
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(-?\d{1,18})(?:-(\d{1,18}))?\s*", part)
        last = int(found[2] or found[1]) if found else 0
        if found is None or not 0 <= last - int(found[1]) < _MOST_SEEDS:
            problem = f"--seeds: must be whole numbers with commas between, such as 0,1,2 or 0-9, got {text!r}"
            raise ConfigError([problem], "the command")
        seeds += range(int(found[1]), last + 1)
    return seeds
