"""From a configuration to what it names: the clients' data, and a backbone with its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.adapters.model import AdaptedModel
from befit.config.experiment import Experiment, FamilySettings
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.data.federation import Federation
from befit.data.folds import folded
from befit.data.limit import limited
from befit.models import load_backbone, load_shapes
from befit.models.source import weights_hash
from befit.runs.clients import family_settings
from befit.tasks import get_task, make_task

if TYPE_CHECKING:
    from befit.tasks.base import Task


def load_model(
    experiment: Experiment, task: str, label_names: Sequence[str], elsewhere: str | None = None
) -> tuple[AdaptedModel, Task, str]:
    """The backbone with places for adapters, the task, and the backbone's fingerprint.

    elsewhere  as for `Host`: the backbone's shapes, on the meta device, with this fingerprint
    """
    experiment = resolve_model(experiment)
    settings, adapter = experiment.model, experiment.adapter
    if elsewhere is None:
        backbone = load_backbone(settings, task, label_names, experiment.federation.seed)
    else:
        backbone = load_shapes(settings, task, label_names, elsewhere)
    built_task = build_task(experiment, task, backbone.processor, label_names)
    model = AdaptedModel(
        backbone.model,
        adapter.targets,
        head=trains_head(experiment, task),
        dropout=adapter.dropout,
        native=adapter.compute == "model",
        new=backbone.new,
    )
    return model, built_task, backbone.fingerprint


def build_task(experiment: Experiment, task: str, processor: Any, label_names: Sequence[str]) -> Task:
    """The task as the configuration wants it."""
    settings, evaluate = experiment.model, experiment.evaluate
    return make_task(
        task,
        processor,
        label_names,
        max_length=settings.max_length,
        prompt=settings.prompt,
        long_prompts=settings.long_prompts,
        generate=evaluate.generate,
        max_new_tokens=evaluate.max_new_tokens,
        metrics=evaluate.metrics or (),
        dpo_beta=experiment.train.dpo_beta,
    )


def drops(experiment: Experiment) -> bool:
    """Whether a model's settings leave records out of training."""
    models = (experiment.model, *(family.model for family in experiment.families.values()))
    return any(model.long_prompts == "drop" for model in models)


def trains_head(experiment: Experiment, task: str) -> bool:
    """Whether slots carry the task head: as configured, or for all tasks that have one."""
    head = experiment.adapter.head
    return head if isinstance(head, bool) else not get_task(task).writes_text


def load_federation(config: Experiment | Mapping[str, Any] | Path | str, secret: str = "") -> Federation:
    """The benchmark or the user's files that the configuration names, as much of them as it wants.

    config  an experiment, its fields as a mapping, or the path of a YAML file, as for `befit.run`
    secret  of a site, by which it divides private records of its own, see `befit.data.files.load.load_files`
    """
    experiment = config if isinstance(config, Experiment) else load_experiment(config)
    federation = _whole_federation(experiment, secret)
    everybody = {client.id: client.info for client in (*federation.clients, *federation.newcomers)}
    federation = limited(federation, experiment.limit, family_settings(resolve_model(experiment), everybody))
    return folded(federation, experiment.evaluate.fold, experiment.federation.seed)


def _whole_federation(experiment: Experiment, secret: str) -> Federation:
    if experiment.benchmark is not None:
        from befit.data.registry import build

        settings = experiment.benchmark
        return build(settings.name, settings.version, settings.arguments)
    from befit.data.files.load import load_files

    assert experiment.data is not None
    private = experiment.privacy.unit == "example"
    return load_files(experiment.data, experiment.federation.seed, experiment.evaluate.by, private, secret)


def columns_of(experiment: Experiment, client: str) -> Mapping[str, str]:
    """What the fields of a client's records are called in its files, as far as it is not as befit calls them."""
    from befit.data.files.client_files import columns_by_client

    data = experiment.data
    if data is None:
        return {}
    by_client = [columns_by_client(places, data.columns) for places in (data.clients, data.newcomers)]
    return next((columns[client] for columns in by_client if client in columns), data.columns)


def weights_hashes(experiment: Experiment) -> dict[str, str]:
    """By model that the configuration names, its `weights_hash`; of a model in several revisions, those of all."""
    experiment = resolve_model(experiment)
    models = [experiment.model, *(family.model for family in experiment.families.values()), experiment.common_model]
    found: dict[str, set[str]] = {}
    for model in models:
        if model is not None and model.id:
            found.setdefault(model.id, set()).add(weights_hash(model.id, model.revision))
    return {name: " ".join(sorted(hashes)) for name, hashes in found.items()}


def resolve_model(experiment: Experiment) -> Experiment:
    """Fill in the benchmark's own model, and those of its families, where the configuration names none."""
    if experiment.model.id:
        return experiment
    if experiment.benchmark is None:
        raise ConfigError(["model.id: is needed with your own data: a directory, a hub id or a model that ships"])
    from befit.data.registry import get

    benchmark, configured = get(experiment.benchmark.name), experiment.families
    families = configured or {
        pattern.partition("=")[2]: FamilySettings([pattern], replace(experiment.model, id=id_))
        for pattern, id_ in benchmark.families.items()
    }
    return replace(experiment, model=replace(experiment.model, id=benchmark.default_model), families=families)
