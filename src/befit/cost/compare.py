"""What methods would cost on one architecture: parameters and bytes, side by side, from shapes alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from befit.adapters.forms import LORA
from befit.adapters.keys import slot_of
from befit.adapters.layout import Layout, ModelShapes
from befit.adapters.model import find_modules, model_shapes
from befit.core.errors import ConfigError, ModelError
from befit.core.values import TensorSpec
from befit.cost.architecture import Architecture
from befit.cost.compute import count, is_of_head, public_records, relative_compute, relative_memory, slot_sizes
from befit.cost.traffic import StageTraffic, stage_traffic, totals
from befit.protocol.check import uncompressed
from befit.protocol.method import Method
from befit.protocol.settings import WireSettings
from befit.protocol.wire import wire_of

_PLAIN = WireSettings()


def compare(
    architecture: Architecture,
    methods: Mapping[str, Method],
    targets: Sequence[str] | str,
    *,
    rounds: int,
    wire: WireSettings = _PLAIN,
    labels: int | None = None,
    head: bool = True,
    clients: int | None = None,
    smallest: Architecture | None = None,
    asked: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """A row for each method, all on the same backbone. Its keys are those of `method_cost`, and of the backbone
    `backbone_parameters`, which are frozen, with the task head where there are `labels`, as a run has it, and
    `adapted_modules`: the linear modules that get an adapter, which `targets` names.

    rounds   of stages that do not say their own
    wire     how arrays travel
    labels   classes of a classification task; None leaves the head out
    head     whether the head is trained, and so travels
    clients  totals over so many clients too
    smallest the smallest backbone of the federation, whose gradients some methods take and send; without, the
             architecture itself
    asked    methods that have to be there, None: all; any other is left out where it cannot be had on this model

    Raises ConfigError where there are fewer clients than a method needs, ModelError for targets that match nothing and
    for a method that was asked for and cannot be had on this model.
    """
    if problems := [
        f"clients: {name} needs at least {method.needs.min_clients}, got {clients}"
        for name, method in methods.items()
        if clients is not None and clients < method.needs.min_clients
    ]:
        raise ConfigError(problems, "the command")
    backbone = architecture.skeleton(labels or 1)
    shapes = model_shapes(backbone, targets, head=head and labels is not None)
    if labels is None:
        _, heads = find_modules(backbone, targets)
        shapes = replace(shapes, targets={name: shape for name, shape in shapes.targets.items() if name not in heads})
    small = None if smallest is None else smallest.skeleton(labels or 1)
    if small is not None:
        shapes = replace(shapes, last=model_shapes(small, "all", head=False).last)
    with_head = labels is not None
    small_parameters = None if small is None else _parameters(small, "all", with_head)
    about = {
        "model": architecture.name,
        "task": architecture.task,
        "backbone_parameters": _parameters(backbone, targets, with_head),
        "adapted_modules": len(shapes.targets),
        "targets": targets if isinstance(targets, str) else list(targets),
        "labels": labels,
    }
    rows: list[dict[str, Any]] = []
    for name, method in methods.items():
        try:
            counted = method_cost(method, shapes, rounds, wire, clients)
        except ModelError:
            if asked is None or name in asked:
                raise
            continue
        relative = relative_cost(method, shapes, about["backbone_parameters"], small_parameters, small_parameters)
        rows.append({**about, "method": name, **counted, **relative})
    return rows


def with_savings(rows: Sequence[Mapping[str, Any]], reference: str = "") -> list[dict[str, Any]]:
    """Rows with `upload_saving`: one minus a method's uploads over the reference's; a single row as it is.

    reference  the method that the others are compared with, named in `saved_against`; the first where it is missing

    None where the reference uploads nothing.

    >>> [row["upload_saving"] for row in with_savings([{"upload_bytes_total": 8}, {"upload_bytes_total": 2}])]
    [0.0, 0.75]
    """
    if len(rows) < 2:
        return [dict(row) for row in rows]
    base = next((row for row in rows if row.get("method") == reference), rows[0])
    sent, against = base["upload_bytes_total"], base.get("method", "")
    return [
        {**row, "upload_saving": 1 - row["upload_bytes_total"] / sent if sent else None, "saved_against": against}
        for row in rows
    ]


def method_cost(
    method: Method, shapes: ModelShapes, rounds: int, wire: WireSettings = _PLAIN, clients: int | None = None
) -> dict[str, Any]:
    """Parameters and bytes of one method; bytes are one client's arrays, as they travel.

    parameters          entries of one adapter, the first of the layout that is trained: A, B, head, total
    slots               the same for every slot of the layout
    trained_parameters  entries that a client trains in some stage, over all slots
    upload_bytes_…      in a round of the last federated stage, and over all stages; download_bytes_… likewise, with
                        what later stages need
    download_bytes_per_reply  by how much a round's download grows with each client that replies; downloads are those
                        where all `clients` do, or one
    head_bytes          what of those four is the task head
    upload_bytes_beside_adapters  what of a federated round's uploads is in none of the slots, such as a gradient
    …_all_clients       `clients` times the totals
    refused             why a run refuses this form of the wire; empty where it takes it
    """
    specs = method.layout.specs(shapes)
    form, replies = wire_of(method, wire, [specs]), clients or 1
    stages, more = (stage_traffic(method, specs, rounds, form, replies=number) for number in (replies, replies + 1))
    slots = slot_sizes(specs, shapes.heads)
    sizes, larger, adapters = _bytes(totals(stages)), _bytes(totals(more)), {slot.name for slot in method.layout.slots}
    several: dict[str, Any] = {}
    if clients is not None:
        several = {"clients": clients}
        several |= {f"{way}_bytes_all_clients": clients * sizes[f"{way}_bytes_total"] for way in ("upload", "download")}
    return {
        "rounds": rounds,
        "dtype": wire.dtype,
        "top_k": wire.top_k,
        "bytes_per_value": getattr(torch, wire.dtype).itemsize,
        "parameters": slots.get(_first_trained(method, specs), {"A": 0, "B": 0, "head": 0, "total": 0}),
        "slots": slots,
        "trained_parameters": count(specs, method.trainable()),
        **sizes,
        "download_bytes_per_reply": larger["download_bytes_per_round"] - sizes["download_bytes_per_round"],
        "head_bytes": _bytes(totals(stages, lambda key: is_of_head(key, shapes.heads))),
        "upload_bytes_beside_adapters": totals(stages, lambda key: slot_of(key) not in adapters)["bytes_up_per_round"],
        **several,
        "refused": [*uncompressed(method, [specs])] if wire.compresses else [],
        "stages": [_stage(stage) for stage in stages],
    }


def relative_cost(
    method: Method, shapes: ModelShapes, backbone: int, smallest: int | None = None, pivot: int | None = None
) -> dict[str, Any]:
    """`compute` and `memory` of a step, relative to plain fine-tuning, and a round's `public_records`; see
    `befit.cost.compute`. `smallest` are the parameters of the federation's smallest backbone, where it is another,
    `pivot` those of the smallest that a client has."""
    specs, trained = method.layout.specs(shapes), method.trainable()
    plain = _plain_entries(method, shapes, specs)
    return {
        "compute": relative_compute(method.work(), specs, trained, backbone, plain, smallest),
        "memory": relative_memory(specs, trained, backbone, plain),
        "public_records": public_records(method.public_work(), specs, trained, backbone, plain, pivot),
    }


def _plain_entries(method: Method, shapes: ModelShapes, specs: Mapping[str, TensorSpec]) -> int | None:
    """Entries of LoRA with the rank of the first slot that is trained, which may be another kind of adapter."""
    name = _first_trained(method, specs)
    return None if not name else count(Layout((replace(method.layout.slot(name), form=LORA),)).specs(shapes))


def _first_trained(method: Method, specs: Mapping[str, TensorSpec]) -> str:
    """The first slot of the layout that some stage trains; empty without one."""
    trained = {slot_of(key) for key in specs if method.trainable()(key)}
    return next((slot.name for slot in method.layout.slots if slot.name in trained), "")


def _stage(stage: StageTraffic) -> dict[str, Any]:
    return {
        "name": stage.name,
        "rounds": stage.rounds,
        "federated": stage.federated,
        "upload_bytes_per_round": stage.per_round("up"),
        "download_bytes_per_round": stage.per_round("down"),
    }


def _bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """`bytes_up_total` as `upload_bytes_total`, and so on."""
    words = {"up": "upload", "down": "download"}
    return {f"{words[w]}_bytes_{p}": sizes[f"bytes_{w}_{p}"] for w in words for p in ("per_round", "total")}


def _parameters(backbone: nn.Module, targets: Sequence[str] | str, with_head: bool) -> int:
    every = sum(parameter.numel() for parameter in backbone.parameters())
    if with_head:
        return every
    _, heads = find_modules(backbone, targets)
    return every - sum(p.numel() for path in heads.values() for p in backbone.get_submodule(path).parameters())
