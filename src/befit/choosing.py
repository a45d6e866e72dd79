"""Which client should get the larger of two models: both trained alone at every client, and what the larger one gains.

FedMosaic, appendix A.3; the arithmetic is in `befit.evaluate.selection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from befit.config import Experiment, ModelSettings, load_experiment
from befit.errors import ConfigError
from befit.evaluate.selection import ALONE, gains, model_choice, scores_of_run
from befit.host import Host, resolve_model
from befit.journal import Observer
from befit.runner import run
from befit.storage import write_json

__all__ = ["choose_models"]

_SIZE = ("rank", "alpha")


def choose_models(
    config: Experiment | Mapping[str, Any] | Path | str, overrides: Sequence[str] = (), *,
    models: tuple[str, str] | None = None, threshold: float = 2.0, out: Path | str, observer: Observer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train every client alone with either model, and say who gains more than `threshold` points by the larger.

    models  two ids; default: the configuration's own model and that of its family
    out     where both runs go, ordinary run directories, and select.json; what is finished there is used
    ->  metric, threshold, models (small, large), clients (by id: scores with either in points of a hundred, gain,
        model), and `families` as a configuration takes them, with the larger model as `model`

    A client trains as long as the configuration says, by its block of the method that trains alone if it has one, else
    with the rank and alpha of its method. Raises ConfigError unless there are two models of different size.
    """
    experiment = resolve_model(load_experiment(config, overrides))
    sizes = _two_models(experiment, models)
    evaluate = replace(experiment.evaluate, newcomers=False, others="never")
    hosts = []
    for settings in sizes:
        name = f"{experiment.name}-{Path(settings.id).name}"
        alone = replace(experiment, name=name, model=settings, families={}, method=_alone(experiment), baselines=[],
                        evaluate=evaluate)  # fmt: skip
        hosts.append(Host(alone))
    small, large = sorted(hosts, key=lambda host: host.smallest.parameters)
    if small.smallest.parameters == large.smallest.parameters:
        raise ConfigError([f"models: {small.experiment.model.id} and {large.experiment.model.id} have as many "
                           "parameters, so neither is the larger"], "the choice of models")  # fmt: skip
    scores = []
    for which, host in (("small", small), ("large", large)):
        path = Path(out) / which
        done = run(host.experiment, out=path, resume=(path / "config.yaml").exists(), host=host, observer=observer)
        scores.append(scores_of_run(done.results))
    gained = gains(*scores)
    chosen = model_choice(gained, threshold)
    found = {
        "metric": large.task.metric,
        "threshold": threshold,
        "models": {"small": small.experiment.model.id, "large": large.experiment.model.id},
        "clients": {
            client: {"small": scores[0][client], "large": scores[1][client], "gain": gain, "model": chosen[client]}
            for client, gain in gained.items()
        },
        "families": {
            "small": {
                "clients": [client for client, which in chosen.items() if which == "small"],
                "model": {"id": small.experiment.model.id},
            }
        },
    }
    write_json(Path(out) / "select.json", found)
    return found


def _two_models(experiment: Experiment, asked: tuple[str, str] | None) -> list[ModelSettings]:
    if asked is not None:
        if asked[0] == asked[1]:
            raise ConfigError([f"models: {asked[0]} twice; name two of different size"], "the choice of models")
        return [replace(experiment.model, id=one, revision=None) for one in asked]
    known = {one.id: one for one in (experiment.model, *(family.model for family in experiment.families.values()))}
    if len(known) != 2:
        raise ConfigError([f"models: the configuration has {len(known)} ({', '.join(known)}), where two are compared; "
                           "name two"], "the choice of models")  # fmt: skip
    return list(known.values())


def _alone(experiment: Experiment) -> dict[str, Any]:
    """The configuration's own block of the method that trains alone, or one with an adapter of the same size."""
    for block in (experiment.method, *experiment.baselines):
        if block["name"] == ALONE:
            return dict(block)
    return {"name": ALONE, **{key: experiment.method[key] for key in _SIZE if key in experiment.method}}
