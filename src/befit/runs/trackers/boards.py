"""The three trackers, each through its own library. Where they send to is their own settings, not befit's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from befit.core.text import dotted
from befit.core.version import __version__

PROJECT = "befit"


@final
class TensorBoard:
    """Event files in tensorboard/ of the run's directory; `tensorboard --logdir` of it shows all its methods.

    A resumed run writes its history anew, so that what an interrupted one wrote is not there twice.
    """

    def __init__(self, run: str, experiment: str, config: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = folder / "tensorboard" / run
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = SummaryWriter(str(directory))
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@final
class WeightsAndBiases:
    """A run of the project befit, in the group of its experiment; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: str, experiment: str, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=PROJECT,
            group=experiment,
            name=f"{experiment} {run}",
            dir=str(folder),
            config={**config, "run": run, "befit": __version__},
            reinit="create_new",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Stages count their rounds from 1 each: the round is a number beside the others, not the library's own step.
        stage = next(iter(values)).split("/")[0]
        self._run.log({**values, f"{stage}/round": step})

    def close(self) -> None:
        self._run.finish()


@final
class MLflow:
    """A run of the experiment befit; MLFLOW_TRACKING_URI says where. Settings are parameters by their dotted names."""

    def __init__(self, run: str, experiment: str, config: Mapping[str, Any], folder: Path) -> None:
        mlflow: Any = import_module("mlflow")
        self._client = mlflow.MlflowClient()
        existing = self._client.get_experiment_by_name(PROJECT)
        number = existing.experiment_id if existing else self._client.create_experiment(PROJECT)
        run_info = self._client.create_run(number, run_name=f"{experiment} {run}", tags={"befit": __version__})
        self._id = run_info.info.run_id
        for name, value in dotted(config).items():
            self._client.log_param(self._id, name, str(value)[:500])  # more it does not store

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)
