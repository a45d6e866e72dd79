"""A check that goes on after the first mistake: settings, data and model, each as far as the others let it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, add_plugins, load_experiment, read_source
from befit.config.overrides import apply_overrides
from befit.core.errors import BefitError, ConfigError

__all__ = ["check_everything"]

# What a check of the data and of the model cannot do without.
_NEEDED = ("benchmark", "data", "model", "plugins")


def check_everything(
    source: Path | str | Mapping[str, Any] | Experiment, overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Experiment:
    """The experiment, as `load_experiment` gives it. Where that refuses it, data and model are looked at all the same.

    Raises ConfigError with the mistakes of all of them. A check of what is right so far is left to the caller.
    """
    try:
        return load_experiment(source, overrides, plugins)
    except ConfigError as error:
        raise ConfigError([*error.problems, *_further(source, overrides, plugins, error)], _place(error)) from error


def _further(
    source: Path | str | Mapping[str, Any] | Experiment,
    overrides: Sequence[str],
    plugins: Sequence[str],
    error: ConfigError,
) -> list[str]:
    """What is wrong with data and model, found with the settings that are at fault at their defaults."""
    from befit.runs.runner import check

    faulty = {problem.split(":")[0].split(".")[0] for problem in error.problems}
    if faulty & {*_NEEDED}:
        return []
    try:
        values, folder, *_ = read_source(source)
        apply_overrides(values, overrides)
        add_plugins(values, plugins)
        kept = {key: value for key, value in values.items() if key not in faulty}
        kept |= {"method": kept.get("method", "local"), "baselines": kept.get("baselines", [])}
        from befit.config.parse import parse_experiment

        experiment, problems = parse_experiment({"name": "check", **kept}, folder)
        if experiment is None or problems:
            return []
        check(experiment)
    except ConfigError as more:
        return [problem for problem in more.problems if problem not in error.problems]
    except BefitError as more:
        return [str(more)]
    return []


def _place(error: ConfigError) -> str:
    return str(error).splitlines()[0].partition(" in ")[2]
