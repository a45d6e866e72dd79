"""Which clients should get the larger of two models: every client trains both alone, and the scores are compared.

FedMosaic, appendix A.3, Table 8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from befit.config.experiment import NO_CHOICE, Experiment, ModelSettings
from befit.config.load import load_experiment
from befit.config.overrides import seeds_problem
from befit.config.parse import sized_like
from befit.core.errors import ConfigError, DataError
from befit.core.storage import check_folder, write_json
from befit.data.limit import limit_sentence
from befit.protocol.registry import ALONE
from befit.runs.host import Host
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.runner import run


def gains(small: Mapping[str, float], large: Mapping[str, float]) -> dict[str, float]:
    """What each client gains by the larger model: its score with it minus its score with the smaller one.

    small, large  scores by client, after training alone with either model (`local`, the paper's SFT)
    Raises DataError unless both are finite and of the same clients.
    """
    if unpaired := sorted(small.keys() ^ large.keys()):
        raise DataError(f"client {unpaired[0]} was trained with one of the two models only; train all with both")
    if unscored := [client for client in small if not math.isfinite(small[client] + large[client])]:
        raise DataError(f"client {unscored[0]} has no score with one of the two models")
    return {client: large[client] - small[client] for client in small}


def model_choice(gained: Mapping[str, float], threshold: float = 2.0) -> dict[str, str]:
    """By client, "large" where it gains more than the threshold, else "small".

    gained     in the unit of the threshold: the default is two points of a hundred
    The paper gives the larger model where the gain is "significant" and states no threshold. Any from 1.70 to 2.85
    gives its choice on DRAKE; on HFLB none does, where a client that gains 1.62 has the small model and one that gains
    1.12 the large. Raises DataError for a threshold that is no number.

    >>> model_choice({"a": 1.7, "b": 2.85})
    {'a': 'small', 'b': 'large'}
    """
    if math.isnan(threshold):
        raise DataError("the threshold must be a number")
    return {client: "large" if gain > threshold else "small" for client, gain in gained.items()}


def scores_of_run(results: Mapping[str, Any]) -> dict[str, float]:
    """Headline scores by client, in points of a hundred, of a finished run's `results.json`."""
    metric = results["metric"]
    scores = {client: row.get(metric) for client, row in results["clients"].items()}
    return {client: 100 * (math.nan if score is None else score) for client, score in scores.items()}


def choose_models(
    config: Experiment | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    *,
    models: Sequence[str] | None = None,
    threshold: float = 2.0,
    seeds: Sequence[int] | None = None,
    out: Path | str,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Train every client alone with each of two models, and find who gains more than `threshold` points by the larger.

    models    two ids; default: the configuration's model and the model of its family
    seeds     of adapters, batches and the split of files that befit splits, one run of either model for each; default:
              the configuration's
    out       where the runs go, ordinary run directories, and select.json; what is finished there is used
    observer  called with the events of the runs, whose labels are "small" and "large", with the seed if seeds are given
    ->        metric, threshold, what a limit leaves, models (small, large), seeds, clients (by id: mean scores with
              either in points of a hundred, mean gain, the gains of each seed, model), and `families` as a
              configuration takes them, with the larger model as `model`

    A client trains as long as the configuration says, by its block of the method that trains alone if it has one, else
    with the rank and alpha of its method. Raises ConfigError unless there are two models of different size.
    """
    experiment = resolve_model(load_experiment(config, overrides))
    if math.isnan(threshold):
        raise ConfigError(["--threshold: must be a number of points, got nan"], "the command")
    check_folder(Path(out))
    sizes = _two_models(experiment, models and [_placed(config, overrides, name) for name in models])
    if seeds is not None and (problem := seeds_problem(seeds)):
        raise ConfigError([f"--seeds: {problem}"], "the command")
    all_seeds = list(seeds or [experiment.federation.seed])
    evaluate = replace(experiment.evaluate, newcomers=False, others="never")
    federation = replace(experiment.federation, **NO_CHOICE)
    alone = replace(
        experiment, families={}, method=_alone(experiment), baselines=[], evaluate=evaluate, federation=federation
    )
    alone = _with_seed(alone, all_seeds[0])
    names = [f"{experiment.name}-{Path(settings.id).name}" for settings in sizes]
    hosts = [Host(replace(alone, name=name, model=model)) for name, model in zip(names, sizes, strict=True)]
    small, large = sorted(hosts, key=_parameters)
    if _parameters(small) == _parameters(large):
        both = f"{small.experiment.model.id} and {large.experiment.model.id}"
        problem = f"models: {both} have as many parameters, so neither is the larger"
        raise ConfigError([problem], "the choice of models")
    scores: dict[str, list[dict[str, float]]] = {"small": [], "large": []}
    for size, host in (("small", small), ("large", large)):
        for index, seed in enumerate(all_seeds):
            path = Path(out) / (size if seeds is None else f"{size}-s{seed}")
            label = size if seeds is None else f"{size}, seed {seed}"
            seeded = host if index == 0 else Host(_with_seed(host.experiment, seed))
            resume, tell = (path / "config.yaml").exists(), _named(observer, label)
            done = run(seeded.experiment, out=path, resume=resume, host=seeded, observer=tell)
            scores[size].append(scores_of_run(done.results))
    by_seed = [gains(*pair) for pair in zip(scores["small"], scores["large"], strict=True)]
    gained = {client: mean(of_seed[client] for of_seed in by_seed) for client in by_seed[0]}
    chosen = model_choice(gained, threshold)
    choice = {
        "metric": large.task.metric,
        "threshold": threshold,
        "limit": limit_sentence(asdict(experiment.limit)),
        "models": {"small": small.experiment.model.id, "large": large.experiment.model.id},
        "seeds": all_seeds,
        "clients": {
            client: {
                **{size: mean(of_seed[client] for of_seed in scores[size]) for size in scores},
                "gain": gain,
                "gains": [of_seed[client] for of_seed in by_seed],
                "model": chosen[client],
            }
            for client, gain in gained.items()
        },
        "families": {
            "small": {
                "clients": [client for client, size in chosen.items() if size == "small"],
                "model": {"id": small.experiment.model.id},
            }
        },
    }
    write_json(Path(out) / "select.json", choice)
    return choice


def _named(observer: Observer | None, label: str) -> Observer | None:
    """Relabel a run's events."""
    return None if observer is None else lambda event: observer({**event, "run": label})


def _parameters(host: Host) -> int:
    return host.backbone_of("").parameters


def _with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The same with other adapters and batches, and another split of files that befit splits."""
    return replace(experiment, federation=replace(experiment.federation, seed=seed))


def _two_models(experiment: Experiment, names: Sequence[str] | None) -> list[ModelSettings]:
    if names is not None:
        if len(names) != 2:
            raise ConfigError([f"models: name two, as A,B, got {','.join(names)}"], "the choice of models")
        if names[0] == names[1]:
            raise ConfigError([f"models: {names[0]} twice; name two of different size"], "the choice of models")
        return [replace(experiment.model, id=name, revision=None) for name in names]
    models = [experiment.model, *(family.model for family in experiment.families.values())]
    by_id = {settings.id: settings for settings in models}
    if len(by_id) != 2:
        problem = f"models: the configuration has {len(by_id)} ({', '.join(by_id)}), where two are compared; name two"
        raise ConfigError([problem], "the choice of models")
    return list(by_id.values())


def _placed(config: Experiment | Mapping[str, Any] | Path | str, overrides: Sequence[str], name: str) -> str:
    """A model's id as the configuration would read it, with a relative path made absolute."""
    return load_experiment(config, [*overrides, f"model.id={json.dumps(name)}"]).model.id


def _alone(experiment: Experiment) -> dict[str, Any]:
    """The configuration's own block of the method that trains alone, or one with an adapter of the same size."""
    for block in experiment.blocks:
        if block["name"] == ALONE:
            return dict(block)
    return sized_like(ALONE, experiment.method)
