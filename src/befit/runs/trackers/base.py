"""What a tracker is, which ones there are, and whether their libraries are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from befit.config.experiment import TRACKERS
from befit.core.errors import ConfigError
from befit.core.text import to_install


class Tracker(Protocol):
    """One run in a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one round, by a path such as federate/test/accuracy."""
        ...

    def close(self) -> None:
        """The run is over, and everything is written."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers whose library is not installed, all at once."""
    problems = [
        f"trackers: {name} is not installed; {to_install(name)}, or take it out of trackers"
        for name in TRACKERS  # whose names are those of their libraries and extras
        if name in names and find_spec(name) is None
    ]
    if problems:
        raise ConfigError(problems)


def make_tracker(name: str, run: str, experiment: str, config: Mapping[str, Any], folder: Path) -> Tracker:
    """Open a run.

    run         the method or baseline
    experiment  the experiment's name
    config      the resolved configuration
    folder      of this run's files, for trackers that keep theirs there
    """
    from befit.runs.trackers import boards

    makers = {"tensorboard": boards.TensorBoard, "wandb": boards.WeightsAndBiases, "mlflow": boards.MLflow}
    return makers[name](run, experiment, config, folder)
