"""One experiment for each of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError

__all__ = ["parse_seeds", "seeded", "with_seed"]


def seeded(experiment: Experiment, seeds: Sequence[int] | None) -> list[Experiment]:
    """The experiment for each seed; without seeds, as it is."""
    return [experiment] if seeds is None else [with_seed(experiment, seed) for seed in seeds]


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with one seed for adapters, cohorts and batches, and for a benchmark's partition if that has one.

    The benchmarks of the papers keep theirs, since their seeds of training and of the partition are independent.
    """
    made = replace(experiment, federation=replace(experiment.federation, seed=seed))
    if made.benchmark is not None:
        from befit.core.schema import parameters_of
        from befit.data.registry import get

        entry = get(made.benchmark.name)
        if entry.seeded and "seed" in {parameter.name for parameter in parameters_of(entry.build)}:
            arguments = {**made.benchmark.arguments, "seed": seed}
            made = replace(made, benchmark=replace(made.benchmark, arguments=arguments))
    return made


def parse_seeds(text: str | None) -> list[int] | None:
    """`--seeds 0,1,2` as numbers; None where it is not given.

    >>> parse_seeds("0,1,2")
    [0, 1, 2]
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        problem = f"--seeds: must be whole numbers with commas between, such as 0,1,2, got {text!r}"
        raise ConfigError([problem], "the command") from None
