"""How much a server may ask of a site: every number that makes work, and how many records stand behind what leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from math import prod
from typing import Any

import numpy as np

from befit.config.experiment import Experiment
from befit.core.schema import Mark, Parameter, parameters_of
from befit.core.values import TensorSpec
from befit.data.federation import ClientData, Record
from befit.data.folds import too_few_to_part, without_part
from befit.data.streams import by_task, dynamic_slices, static_slices
from befit.flower.site_file import Limits
from befit.protocol.method import Method
from befit.protocol.registry import get_method
from befit.protocol.schedule import resolved_stages
from befit.protocol.settings import BaseSettings

# Settings of a run to the limit that they may not exceed; batches of training have a least as well, see `_too_few`.
MOST = {
    "train.max_steps": "max_steps",
    "evaluate.batch_size": "max_batch",
    "model.max_length": "max_length",
    "evaluate.max_new_tokens": "max_length",
}
# Whole numbers of a run that make no work by themselves, however large they are; of rounds, those of all stages do.
HARMLESS = frozenset(
    {
        "federation.rounds",
        "train.warmup_steps",
        "train.micro_batch",
        "federation.seed",
        "limit.clients",
        "limit.records",
        "limit.rounds",
    }
)
_BENCHMARK_RECORDS = 10**6  # clients times records of each, of a benchmark that is made here
_ENTRIES = 10_000  # of any list or mapping that a server sends: classes, modules, ranks by client


def too_large(settings: Mapping[str, Any], method: Mapping[str, Any]) -> Iterator[str]:
    """Lists and mappings of a request, at any depth, with more entries than any use needs; nothing is made of them."""
    waiting: list[tuple[str, Any]] = [(block, settings[block]) for block in settings] + [("method", method)]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, (Mapping, list)):
            continue
        if len(value) > _ENTRIES:
            yield f"{path}: has {len(value)} entries; a site takes at most {_ENTRIES}"
            continue
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        waiting += [(f"{path}.{key}", entry) for key, entry in entries]


def exceeded(experiment: Experiment, method: Method, limits: Limits) -> Iterator[str]:
    """Every number of an experiment that is beyond a site's limits, before any data or model is read."""
    for path, limit in MOST.items():
        block, _, key = path.partition(".")
        yield from _above(path, getattr(getattr(experiment, block), key), limits, limit)
    if (common := experiment.common_model) is not None:
        yield from _above("common_model.max_length", common.max_length, limits, "max_length")
    yield from _too_few(experiment, limits)
    loops: dict[str, dict[str, int]] = {}  # by the block that they are in
    for path, marks, number in _numbers_of(experiment):
        if Mark.CAP not in marks:
            yield from _above(path, number, limits, "max_rank" if path.endswith("rank") else "max_steps")
        if Mark.DRAWN in marks and number < limits.min_records:
            yield f"{path}: {number} records are fewer than the site allows, {limits.min_records} (limits.min_records)"
        if Mark.LOOP in marks:
            block, _, name = path.rpartition(".")
            loops.setdefault(block, {})[name] = number
    for block, numbers in loops.items():
        yield from _above(f"{block}: {' x '.join(numbers)}", prod(numbers.values()), limits, "max_steps")
    for slot in method.layout.slots:
        yield from _above(f"method: the rank of slot {slot.name}", slot.rank, limits, "max_rank")
    stages = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
    total, names = sum(stage.rounds or 0 for stage in stages), ", ".join(stage.name for stage in stages)
    named = experiment.method["name"]
    yield from _above(f"method: the rounds of {named} ({names})", total, limits, "max_rounds")
    if experiment.benchmark is not None:
        sizes = {key: value for key, value in experiment.benchmark.arguments.items() if _is_size(key, value)}
        clients = max((number for key, number in sizes.items() if key.startswith("clients")), default=1)
        records = sum(number for key, number in sizes.items() if not key.startswith("clients"))
        if clients * max(records, 1) > _BENCHMARK_RECORDS:
            yield (
                f"benchmark: {clients} clients with up to {records} records are too much for a trial; a site makes at "
                f"most {_BENCHMARK_RECORDS} records"
            )


def _above(what: str, number: float, limits: Limits, limit: str) -> Iterator[str]:
    most = getattr(limits, limit)
    if number > most:
        yield f"{what}: {number} is more than the site allows, {most} (limits.{limit})"


def _too_few(experiment: Experiment, limits: Limits) -> Iterator[str]:
    """Batches, and steps of them, that too few records would be behind."""
    steps, least = experiment.train.max_steps, limits.min_records
    for path, batch in _batches(experiment):
        if batch < limits.min_batch:
            yield f"{path}: {batch} is less than the site allows, {limits.min_batch} (limits.min_batch)"
        if batch > limits.max_batch:
            yield f"{path}: {batch} is more than the site allows, {limits.max_batch} (limits.max_batch)"
        if experiment.train.epochs is None and steps * batch < least:
            yield (
                f"{path}: {steps} steps of {batch} records would make an update of fewer records than the site "
                f"allows, {least} (limits.min_records)"
            )


def _batches(experiment: Experiment) -> Iterator[tuple[str, int]]:
    """Every batch size that training on the client's own records has: the run's, and one of a base in a method."""
    yield "train.batch_size", experiment.train.batch_size
    block, path = experiment.method, "method"
    while isinstance(block, Mapping):
        train = block.get("train")
        if isinstance(train, Mapping) and "batch_size" in train:
            yield f"{path}.train.batch_size", train["batch_size"]
        inner = [parameter.name for parameter in get_method(block["name"]).parameters if Mark.METHOD in parameter.marks]
        path, block = (f"{path}.{inner[0]}", block.get(inner[0])) if inner else (path, None)


def _numbers_of(experiment: Experiment) -> Iterator[tuple[str, frozenset[Mark], int]]:
    """Every whole number in a method's block, at any depth, with the marks of the parameter that it is for."""
    yield from _numbers(get_method(experiment.method["name"]).parameters, experiment.method, "method")
    if experiment.train.epochs is not None:
        yield "train.epochs", frozenset({Mark.PASSES}), experiment.train.epochs


def _numbers(parameters: Sequence[Parameter], block: Any, path: str) -> Iterator[tuple[str, frozenset[Mark], int]]:
    by_name = {parameter.name: parameter for parameter in parameters}
    for key, value in block.items() if isinstance(block, Mapping) else enumerate(block):
        parameter = by_name.get(str(key))
        if isinstance(value, (Mapping, list, tuple)):
            inner: Sequence[Parameter] = ()
            if isinstance(value, Mapping) and "name" in value:
                inner = (*parameters_of(BaseSettings), *get_method(value["name"]).parameters)
            elif parameter is not None and is_dataclass(parameter.type):
                inner = parameters_of(parameter.type)  # type: ignore[arg-type]
            yield from _numbers(inner, value, f"{path}.{key}")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{path}.{key}", parameter.marks if parameter is not None else frozenset(), value


def _is_size(key: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and key != "seed"


def fewest_records(train: Sequence[Record], experiment: Experiment, method: Method) -> int:
    """The fewest train records that an update of this client would be made of: all, or under a stream those that come
    first in any stage; of a method that holds a share of them out, the fewer of both parts; of one that leaves out a
    part in turns, those beside the largest."""
    parts = max((stage.parts for stage in method.plan()), default=1)
    if parts > 1:
        client = ClientData("", train)
        train = min((without_part(client, number + 1, parts, 0).train for number in range(parts)), key=len)
    if experiment.stream.kind == "none":
        held_out = [round(share * len(train)) for share in _held_out(experiment.method)]
        return min([len(train), *held_out, *(len(train) - count for count in held_out)])
    cut = dynamic_slices if experiment.stream.kind == "dynamic" else static_slices
    tasks, rng = list(by_task(train).values()), np.random.default_rng(0)  # sizes do not depend on what is drawn
    stages = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
    lengths = [[len(arriving) for arriving in cut(tasks, stage.rounds or 1, rng)] for stage in stages]
    return min(next((length for length in stage if length), 0) for stage in lengths)


def lacking_records(data: ClientData, experiment: Experiment, method: Method, limits: Limits) -> Iterator[str]:
    """Why a method cannot run on a site's own records, of which it has too few."""
    least = limits.min_records
    chooses = experiment.federation.deploy == "best"
    if ("val" in method.needs.splits or chooses) and len(data.val) < least:
        yield (
            f"it would measure on fewer val records than the site allows, {least} (limits.min_records); a larger "
            "data.val_fraction holds more out"
        )
    if any(too_few_to_part(data, stage.parts) for stage in method.plan()):
        yield "it leaves out parts of the train records, and the site has too few, or too few groups of them"
    elif fewest_records(data.train, experiment, method) < least:
        yield f"an update would be of fewer train records than the site allows, {least} (limits.min_records)"
    yield from too_many_passes(len(data.train), experiment, limits)


def too_many_passes(records: int, experiment: Experiment, limits: Limits) -> Iterator[str]:
    """Numbers of passes over this client's train records that are more steps than a site takes in one update."""
    batch = min(size for _, size in _batches(experiment))
    for path, marks, epochs in _numbers_of(experiment):
        if Mark.PASSES in marks:
            yield from _above(
                f"{path}: the steps of {epochs} passes", epochs * -(-records // batch), limits, "max_steps"
            )


def _held_out(block: Mapping[str, Any]) -> Iterator[float]:
    """Shares of the train records that a method, or one within it, holds out from its training."""
    for parameter in get_method(block["name"]).parameters:
        value = block.get(parameter.name)
        if Mark.HELD_OUT in parameter.marks and isinstance(value, float):
            yield value
        elif Mark.METHOD in parameter.marks and isinstance(value, Mapping):
            yield from _held_out(value)


def size_of(layout: Mapping[str, TensorSpec]) -> int:
    """Bytes of all arrays that a method puts on a model, in float32."""
    return sum(4 * prod(spec.shape) for spec in layout.values())
