"""What an experiment will take, from shapes alone: parameters, bytes per round, memory. Reads no weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from befit.adapters.layout import ModelShapes
from befit.adapters.model import find_modules, model_shapes
from befit.adapters.whole_model import Whole
from befit.config.experiment import Experiment, method_blocks
from befit.core.errors import DataError, ModelError
from befit.core.values import TensorSpec
from befit.cost.compute import count
from befit.cost.traffic import communication
from befit.data.federation import SPLITS, Federation
from befit.data.record_counts import count_records
from befit.models import skeleton
from befit.models.backbone import pick_device
from befit.protocol.check import check
from befit.protocol.client_privacy import hides_clients
from befit.protocol.context import Context, Problem
from befit.protocol.method import Method, run_stages, shared_stages_of, trains_in_fleets
from befit.protocol.privacy import epsilon_sentence, private_stages
from befit.protocol.registry import build_method
from befit.protocol.schedule import replies_of, resolved_stages
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.wire import wire_of
from befit.runs.clients import (
    OWN_MODEL,
    check_choice,
    check_clients,
    context_of,
    family_experiment,
    family_settings,
    refuse,
    warning_of,
)
from befit.runs.fleets import largest
from befit.runs.loading import drops, load_federation, resolve_model, trains_head
from befit.runs.peft_start import start_problems
from befit.runs.precheck import precheck, precheck_common, without_effect
from befit.tasks import get_task
from befit.tasks.images import KEPT, ImagePreprocessor, stored_bytes
from befit.train.rows import TOKENS

Seen = TypeVar("Seen")


class Once(Protocol):
    """Looks at something, unless that has been done."""

    def __call__(self, what: str, look: Callable[[], Seen]) -> Seen: ...


def _each_time(what: str, look: Callable[[], Seen]) -> Seen:
    return look()


def estimate(experiment: Experiment, once: Once = _each_time) -> dict[str, Any]:
    """Everything `befit check` shows. Raises the errors that a run would, before anything is trained.

    Bytes are those of one client's arrays as encoded for the wire; a few numbers beside them are not counted. With a
    cohort, a client takes part in some rounds only, and the totals are for one that takes part in all. Where clients
    have different backbones, `families` has a row for each, and the numbers of clients of the first one are on top;
    the memory is that of one process that holds all backbones. `opening_mib` is what a server needs beside them before
    the first round.

    once  gives what was found when something was looked at before, by its name, or looks: for callers with many
          experiments that differ in their methods alone
    """
    experiment = resolve_model(experiment)
    try:
        federation = once("data", lambda: load_federation(experiment))
    except DataError as error:
        raise _with_the_model(error, experiment) from error
    check_clients(federation, experiment)
    check_choice(experiment)
    runs: list[tuple[str, Method]] = [
        (label, build_method(config)) for label, config in method_blocks(experiment).items()
    ]
    experiment = _with_largest_batch(experiment, [method for _, method in runs])
    infos = {client.id: client.info for client in federation.clients}
    members = family_settings(experiment, infos, whole=federation.has_all_clients)
    newcomers = {client.id: client.info for client in federation.newcomers} if experiment.evaluate.newcomers else {}
    arriving = family_settings(experiment, newcomers, whole=False)
    context = context_of(experiment, federation, {**members, **arriving}, {})
    refuse((label, problem) for label, method in runs for problem in check(method, context))
    name = runs[0][0]
    families = [
        _of_family(
            experiment,
            family,
            replace(
                federation,
                clients=tuple(client for client in federation.clients if members[client.id] == family),
                newcomers=tuple(client for client in federation.newcomers if arriving.get(client.id) == family),
            ),
            runs,
            context,
            lambda what, look, family=family: once(f"{what} {family}", look),
        )
        for family in dict.fromkeys(members.values())
    ]
    if any(method.needs.common_model for _, method in runs):
        once("records of the common model", lambda: _check_common(experiment, federation, families))
    rows = [family.row for family in families]
    shapes = {family.name: family.shapes for family in families}
    preprocessors = {one.key: one for family in families if (one := family.preprocessor) is not None}
    family_warnings = [
        (label, problem) for label, method in runs for problem in check(method, replace(context, shapes=shapes))
    ]
    refuse(family_warnings)
    memory = {
        part: (sum if part == "backbone" else max)(row["memory_parts_mib"][part] for row in rows)
        for part in rows[0]["memory_parts_mib"]
    }
    if preprocessors:
        memory["images"] = images_mib(federation, preprocessors.values())
    return {
        **rows[0],
        "method": name,
        "baselines": [other for other, _ in runs[1:]],
        "clients": len(federation.clients),
        "cohort": experiment.federation.cohort,
        "train_examples": sum(len(client.train) for client in federation.clients),
        "data": once("counts", lambda: count_records(federation).as_dict()),
        "memory_mib": sum(memory.values()),
        "memory_parts_mib": memory,
        "opening_mib": max(method.opening_bytes(shapes, experiment.model.max_length) for _, method in runs) / 2**20,
        "families": [{"family": family.name, **family.row} for family in families] if len(families) > 1 else [],
        "stages": [
            {"run": label, "name": stage.name, "rounds": stage.rounds, "uplink": stage.federated}
            for label, method in runs
            for stage in resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
        ],
        "privacy": _privacy(runs, context),
        "warnings": [
            *dict.fromkeys(warning_of(label, problem) for label, problem in family_warnings),
            *_warnings(experiment, federation),
            *(warning for family in families for warning in family.warnings),
        ],
    }


def _with_the_model(error: DataError, experiment: Experiment) -> DataError:
    """The data's error, with what is wrong with the model too."""
    if experiment.data is None:
        return error
    try:
        skeleton(experiment.model, experiment.data.task, experiment.data.label_names or ("a", "b"))
    except ModelError as more:
        return DataError(f"{error}\n  model.id: {more}")
    return error


@dataclass(frozen=True)
class _Family:
    """Clients with one backbone.

    row           what they take
    preprocessor  how the backbone takes images, if it does
    """

    name: str
    row: dict[str, Any]
    warnings: list[str]
    shapes: ModelShapes
    preprocessor: ImagePreprocessor | None


def _check_common(experiment: Experiment, federation: Federation, families: Sequence[_Family]) -> None:
    """Raise DataError where clients cannot read their records in the terms of the model that all have."""
    if drops(experiment):  # of records that are too long; which ones are left is only known with everybody's tokenizer
        return
    if experiment.common_model is None and len(families) == 1:  # whose records are read in its terms anyway
        return
    if (settings := experiment.common_model) is not None:
        key, common = "common_model", replace(experiment, model=settings, families={})
    else:
        name = min(families, key=lambda family: family.row["backbone_parameters"]).name
        common = family_experiment(experiment, name)
        key = "model" if name == OWN_MODEL else f"families.{name}.model"
    precheck_common(common, federation, key)


def _of_family(
    experiment: Experiment,
    name: str,
    federation: Federation,
    runs: Sequence[tuple[str, Method]],
    context: Context,
    once: Once,
) -> _Family:
    """What clients with one backbone take.

    federation  of these clients, and of the newcomers among them that are measured
    context     of all
    """
    experiment = family_experiment(experiment, name)
    backbone = once("skeleton", lambda: skeleton(experiment.model, federation.task, federation.label_names))
    shapes = model_shapes(backbone, experiment.adapter.targets, trains_head(experiment, federation.task))
    family_context = replace(context, shapes={name: shapes})
    found = [
        (label, problem)
        for label, each_method in runs
        for problem in (*check(each_method, family_context), *_in_full(each_method, experiment))
    ]
    targets, heads = find_modules(backbone, experiment.adapter.targets)
    refuse([*found, *start_problems(experiment, runs, targets | heads, shapes)])
    method = runs[0][1]
    specs = method.layout.specs(shapes)
    warnings, preprocessor = once("records", lambda: precheck(experiment, federation, backbone))
    warnings = [*without_effect(experiment, federation.task), *warnings]
    wire, sums = wire_of(method, experiment.wire, [specs]), experiment.federation.secure_sums
    trainable = {key: spec for key, spec in specs.items() if method.trainable()(key)}
    rounds = experiment.federation
    replies = replies_of(len(federation.clients), rounds.cohort, rounds.asynchronous)
    hidden = None if sums is None else lambda stage: FixedPoint(sums, specs, replies, stage.mean == "examples").width
    rows_each = getattr(get_task(federation.task).make, "rows_each", 1)
    private = experiment.privacy.unit == "example" and private_stages(method) == run_stages(method)
    alone = trains_in_fleets(method) or rows_each > 1 or private
    of_process = math.ceil(len(context.federation.clients) / experiment.engine.workers)
    at_once = 1 if alone else min(replies, of_process)
    row = {
        "model": experiment.model.id,
        "clients": len(federation.clients),
        "train_examples": sum(len(client.train) for client in federation.clients),
        "backbone_parameters": sum(p.numel() for p in backbone.parameters()),
        "adapted_modules": len(shapes.targets),
        "trainable_parameters": count(trainable),
        **communication(method, specs, experiment.federation.rounds, wire, experiment.limit.rounds, replies, hidden),
        "memory_parts_mib": memory_mib(experiment, backbone, specs, trainable, at_once, rows_each),
    }
    return _Family(name, row, warnings, shapes, preprocessor)


def memory_mib(
    experiment: Experiment,
    backbone: nn.Module,
    specs: Mapping[str, TensorSpec],
    trainable: Mapping[str, TensorSpec],
    clients: int,
    rows_each: int,
) -> dict[str, float]:
    """Parts of the memory of one training process, without Python and its libraries (about 500 MiB).

    Activations are a rule of thumb, 34 numbers per token, layer and hidden unit and the attention matrices
    (Korthikanti et al. 2023, eq. 2), for one batch; a tenth of that with gradient checkpointing. Of clients that train
    as one (`engine.fleet`) each has its adapters, and their batches are one; of texts a bucket's worth of them.

    clients    how many of one process there are in a round, and can train as one
    rows_each  rows of a batch that one example has
    """
    whole: Any = backbone.config
    config = whole.get_text_config()  # of the part that adapters sit on, in a model that also sees
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(torch, experiment.model.dtype).itemsize
    tokens = _tokens(config, experiment.model.max_length)
    device, parameters = pick_device(experiment.model.device).type, sum(p.numel() for p in backbone.parameters())
    fleet, batch = largest(experiment.engine.fleet, clients, device, parameters), experiment.train.batch_size
    if (part := experiment.train.micro_batch) is not None:
        fleet, batch = 1, min(batch, part)
    if fleet > 1:
        seen = getattr(config, "image_size", None)
        batch = fleet * batch if seen else min(fleet * batch, max(1, TOKENS[device] // tokens))
    batch *= rows_each
    # of each further client its values, gradients and averages, and its copies before and after
    lanes = (fleet - 1) * (4 * count(specs) + 2 * count(trainable)) + 2 * count(specs) * (fleet > 1)
    activations = batch * tokens * layers * (17 * hidden + 2.5 * heads * tokens) * width
    if experiment.model.gradient_checkpointing:
        activations /= 10
    bits = {"none": 8 * width, "int8": 8, "nf4": 4.5}[experiment.model.quantise]
    return {
        "backbone": parameters * bits / 8 / 2**20,
        # values, gradients and the copy of the initial values of every slot, and AdamW's two averages
        "adapters": 4 * (3 * count(specs) + 2 * count(trainable) + lanes) / 2**20,
        "activations": activations / 2**20,
    }


def images_mib(federation: Federation, preprocessors: Collection[ImagePreprocessor]) -> float:
    """The federation's images in one process: as they are stored, where that is in memory, and as many of them as
    tensors as are kept at a time. Public records and newcomers count too.

    preprocessors  of the backbones, each kind once
    """
    everybody = [*federation.clients, *federation.newcomers]
    parts = [federation.public, *(getattr(client, split) for client in everybody for split in SPLITS)]
    images = {
        image if isinstance(image, str) else id(image): stored_bytes(image)
        for records in parts
        for record in records
        for image in (*record.get("images", ()), *([record["image"]] if "image" in record else []))
    }
    tensors = len(images) * sum(preprocessor.nbytes for preprocessor in preprocessors)
    return (sum(images.values()) + min(KEPT, tensors)) / 2**20


def _tokens(config: Any, max_length: int) -> int:
    if getattr(config, "image_size", None) and getattr(config, "patch_size", None):
        return (config.image_size // config.patch_size) ** 2 + 1
    return min(max_length, getattr(config, "max_position_embeddings", max_length) or max_length)


def _in_full(method: Method, experiment: Experiment) -> list[Problem]:
    """Quantised weights where every weight is trained."""
    if experiment.model.quantise == "none" or not any(isinstance(slot.form, Whole) for slot in method.layout.slots):
        return []
    text = f"{experiment.model.quantise} weights cannot be trained in full; set it to none, or take low-rank adapters"
    return [Problem("error", "model.quantise", text)]


def _with_largest_batch(experiment: Experiment, methods: Sequence[Method]) -> Experiment:
    """With the largest batch of the run, which may be that of a method's base."""
    shared = [stages.settings for method in methods for stages in shared_stages_of(method).values()]
    largest = max((settings.get("train", {}).get("batch_size", 0) for settings in shared), default=0)
    if largest <= experiment.train.batch_size:
        return experiment
    return replace(experiment, train=replace(experiment.train, batch_size=largest))


_FEW = 20  # examples that a score should be of at least
_FEW_TO_CHOOSE_BY = 10  # with 15 on average choices gained; fewer were not tried


def _warnings(experiment: Experiment, federation: Federation) -> list[str]:
    warnings, split = [], experiment.evaluate.split
    if experiment.privacy.reproducible:
        warnings.append("privacy.reproducible: noise that can be computed again from the seed protects nobody")
    train, rounds = experiment.train, experiment.federation.rounds
    trained = {client.id: len(client.train) for client in federation.clients}
    steps = rounds * max(map(train.steps_for, trained.values()), default=0)
    if train.schedule_over == "stage" and train.warmup_steps >= max(1, steps):
        warnings.append(
            f"train.warmup_steps: {train.warmup_steps}, and federation.rounds, {rounds}, have {steps} steps in all: "
            "the rate only rises"
        )
    batch = train.batch_size
    if who := _below(batch, trained, "training examples", f"train.batch_size, {batch}"):
        warnings.append(who)
    clients = (
        federation.clients if experiment.data is not None else ()
    )  # those of benchmarks are as their makers wanted
    measured = {client.id: count for client in clients if (count := len(getattr(client, split)))}
    if who := _below(_FEW, measured, f"{split} examples", str(_FEW)):
        warnings.append(f"{who}: each is worth more than {100 / _FEW:g} points of accuracy")
    held_out = {client.id: len(client.val) for client in clients if experiment.federation.deploy == "best"}
    if who := _below(_FEW_TO_CHOOSE_BY, held_out, "validation examples", str(_FEW_TO_CHOOSE_BY)):
        warnings.append(f"{who}: what federation.deploy: best chooses by so few is largely chance")
    if split == "val" and experiment.benchmark is not None:
        warnings.append("evaluate.split is val: the numbers are not test results")
    return warnings


def _privacy(runs: Sequence[tuple[str, Method]], context: Context) -> dict[str, str]:
    """By run, what it spends; nothing where nothing is protected."""
    counts = {client.id: len(client.train) for client in context.federation.clients}
    if context.privacy is None:
        return {}
    return {
        label: epsilon_sentence(context.privacy, method, context.train, counts)
        if (plan := hides_clients(method, context)) is None
        else plan.epsilon_sentence()
        for label, method in runs
    }


def _below(least: int, counts: Mapping[str, int], what: str, limit: str) -> str:
    """Who has fewer, in words; empty where nobody has.

    >>> _below(20, {"a": 6, "b": 40}, "test examples", "20"), _below(20, {"a": 6, "b": 9}, "test examples", "20")
    ('client a has 6 test examples, fewer than 20', '2 clients have fewer test examples than 20 (a has 6, the fewest)')
    """
    small = sorted((count, client) for client, count in counts.items() if count < least)
    if not small:
        return ""
    (count, client), *others = small
    if not others:
        return f"client {client} has {count} {what}, fewer than {limit}"
    return f"{len(small)} clients have fewer {what} than {limit} ({client} has {count}, the fewest)"
