"""What would stop a run before its first step, as far as it can be told without reading weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from befit.config.experiment import Experiment
from befit.core.errors import DataError
from befit.core.schema import Mark, Parameter, parameters_of
from befit.core.text import PROGRESS, first_of
from befit.data.federation import Federation, Record
from befit.data.long_prompts import left_out_sentence, without_left_out
from befit.models import skeleton
from befit.models.backbone import check_quantisation, load_processor, pick_device
from befit.models.source import find_model, is_hub_id
from befit.protocol.registry import get_method
from befit.runs.loading import build_task
from befit.tasks import get_task, task_names
from befit.tasks.images import ImagePreprocessor

if TYPE_CHECKING:
    from befit.tasks.base import Task

progress = logging.getLogger(PROGRESS)
_MANY = 20_000  # records of a client that take seconds


def precheck(
    experiment: Experiment, federation: Federation, model: nn.Module
) -> tuple[list[str], ImagePreprocessor | None]:
    """Raise what loading the model and preparing the records would raise; return what a person should know, and how
    the model takes images, if it does.

    federation  with those newcomers that are measured
    model       the skeleton

    Looks whether weights are there (not on the hub, where that would download them), loads the tokenizer or image
    processor, tokenises texts and opens the user's own pictures. Weights are not read.
    """
    settings, task = experiment.model, federation.task
    check_quantisation(settings)
    pick_device(settings.device)
    directory, source = find_model(settings.id, settings.revision, weights=not is_hub_id(settings.id))
    processor, _ = load_processor(task, directory, model, source)
    built_task = build_task(experiment, task, processor, federation.label_names)
    images = isinstance(processor, ImagePreprocessor)
    warnings: list[str] = []
    members = (*federation.clients, *federation.newcomers)
    if settings.long_prompts == "drop":
        federation = without_left_out(federation, {client.id: built_task for client in members})
        warnings.append(left_out_sentence(federation.manifest["left_out"]))
    limit = math.inf if images else getattr(processor, "tokenizer", processor).model_max_length
    if settings.max_length > limit:
        warnings.append(
            f"model.max_length is {settings.max_length}, but {source} takes {limit} tokens: longer texts are cut there"
        )
    _check_records(built_task, _read_by_a_run(experiment, federation))
    return warnings, getattr(built_task, "preprocessor", None)


def precheck_common(experiment: Experiment, federation: Federation, key: str) -> None:
    """Raise DataError where the model that all clients have beside their own cannot read a training record, which a
    client would meet in its first round.

    experiment  with that model as its own
    key         of its settings in the configuration
    """
    model = skeleton(experiment.model, federation.task, federation.label_names)
    directory, source = find_model(experiment.model.id, experiment.model.revision, weights=False)
    processor, _ = load_processor(federation.task, directory, model, source)
    task = build_task(experiment, federation.task, processor, federation.label_names)
    try:
        _check_records(task, ((f"client {client.id}, train", client.train) for client in federation.clients))
    except DataError as error:
        raise DataError(str(error).replace("model.max_length", f"{key}.max_length")) from error


def _check_records(task: Task, found: Iterable[tuple[str, Sequence[Record]]]) -> None:
    problems = []
    for whose, records in found:
        if len(records) > _MANY:
            progress.info("reading the records of %s as the model will, %d …", whose, len(records))
        try:
            task.check(records)
        except DataError as error:
            problems.append(f"{whose}: {error}")
    if problems:
        raise DataError(first_of(problems, 5, "\n  "))


def _read_by_a_run(experiment: Experiment, federation: Federation) -> Iterator[tuple[str, Sequence[Record]]]:
    """What a run reads of clients and newcomers, and of public records of the user's own: whose, and the records."""
    split, chooses = experiment.evaluate.split, experiment.federation
    splits = ["train", split]
    if split != "val" and (chooses.deploy == "best" or chooses.patience is not None):
        splits.append("val")
    for client in federation.clients:
        for name in splits:
            yield f"client {client.id}, {name}", getattr(client, name)
    for client in federation.newcomers:
        for name in ("train", split):
            yield f"newcomer {client.id}, {name}", getattr(client, name)
    if experiment.data is not None and experiment.data.public is not None:
        yield "public records", federation.public


def without_effect(experiment: Experiment, task: str) -> list[str]:
    """Settings of methods that mean nothing for the task."""
    blocks: Sequence[tuple[str, dict[str, Any]]] = [
        ("method", experiment.method),
        *((f"baselines.{index}", block) for index, block in enumerate(experiment.baselines)),
    ]
    if get_task(task).writes_text:
        return []
    return [
        f"{key}: {value} is for {', '.join(task_names(writes_text=True))} and has no effect on {task}, which has one "
        "term per example"
        for path, block in blocks
        for key, value in _about_tokens(get_method(block["name"]).parameters, block, path)
    ]


def _about_tokens(parameters: Sequence[Parameter], block: Mapping[str, Any], path: str) -> Iterator[tuple[str, object]]:
    """Options about the tokens of an answer that are not at their defaults, with their values, in any depth."""
    for parameter in parameters:
        value = block.get(parameter.name, parameter.default)
        if Mark.TOKENS in parameter.marks and value != parameter.default:
            yield f"{path}.{parameter.name}", value
        elif is_dataclass(parameter.default) and isinstance(value, Mapping):
            yield from _about_tokens(parameters_of(type(parameter.default)), value, f"{path}.{parameter.name}")
