"""Adapters as standard PEFT checkpoints, and back.

A deployment of one or several slots becomes one LoRA adapter; a task head goes into `modules_to_save` with all that was
trained of it, low-rank or not, since a stranger's copy of the backbone may have a new head. So does what the backbone's
checkpoint lacks and the seed has drawn, such as the pooler of a masked language model. Weights that depend on the
input cannot be folded: then the checkpoint holds the client's own slot, and says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from befit.adapters.forms import LORA
from befit.adapters.keys import join, slot_of, split
from befit.adapters.layout import Slot
from befit.adapters.lowrank import spectrum
from befit.adapters.mixers import Weights, constant_weights, forward_passes
from befit.adapters.model import AdaptedModel, head_children
from befit.core.errors import ModelError
from befit.core.storage import atomic_write, write_json
from befit.core.values import State
from befit.core.wire import pieces
from befit.tasks import get_task

if TYPE_CHECKING:
    from befit.protocol.method import Deployment

PREFIX = "base_model.model."
HEAD_ALONE = "dummy-target-modules"  # PEFT's name for no target modules, where a task head alone was trained
PARTIAL = "which no PEFT adapter can hold"  # in the card of a checkpoint that is not the whole deployed model


def write_adapter(
    folder: Path,
    deployed: Deployment,
    model: AdaptedModel,
    *,
    base: str,
    task: str,
    note: str = "",
    label_names: Sequence[str] = (),
) -> None:
    """Write `adapter_config.json`, `adapter_model.safetensors` and a README.md that PEFT and the hub understand.

    The configuration has the keys that say something or that every reader asks for, so that other versions of PEFT and
    other programs read it too. PEFT itself is not imported, which would be a sixth of a small run's start.

    base  name or path of the backbone, as it is written into the checkpoint
    note  a sentence for the README
    label_names  of a classification task, in the order of the logits, for the README
    Raises ModelError for weights that are not finite. A client that never trained exports an adapter of zeros.
    """
    kind = get_task(task)
    arrays, slots = deployed.arrays, deployed.slots
    weights = constant_weights(deployed.mixer, model.layout, slots, arrays)
    if weights is None:
        slots, weights = (deployed.own or slots[-1],), lambda layer: (1.0,)
        mixed = ", ".join(deployed.slots)
        apart = len(forward_passes(deployed.mixer, deployed.slots)) > 1
        how = "adds up the logits of models with one each of" if apart else "mixes by weights that depend on the input"
        note += (
            f" The deployed model {how} the slots {mixed}, {PARTIAL}: this checkpoint is the slot "
            f"{slots[0]!r} alone. `befit predict` uses the whole."
        )
    tensors, slot = _fold(arrays, slots, weights, model)
    biases = _biases(arrays, slots, weights, model, slot.scale)
    if biases:
        note += (
            " It has biases beside its low-rank updates (lora_bias), which PEFT applies but merges only into modules "
            "that have a bias of their own."
        )
    weights_A = {name: f"{PREFIX}{model.paths[name]}.lora_A.weight" for name in model.shapes.targets}
    ranks = {name: len(tensors[key]) for name, key in weights_A.items() if key in tensors}
    heads = saved_modules(arrays, slots, model)
    if not ranks and not heads:
        raise ModelError(f"not writing {folder}: no module has a rank, and PEFT holds no adapter without one")
    other = {model.paths[name]: rank for name, rank in ranks.items() if rank != slot.rank}
    tensors = {**head_tensors(heads, model), **tensors, **biases}
    _check_worth_writing(tensors, folder)
    alpha = slot.alpha
    config = {
        "peft_type": "LORA",
        # PEFT looks for a classifier in every checkpoint that says "SEQ_CLS", also where none was trained.
        "task_type": kind.peft_type if heads or not kind.has_classes else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": slot.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(_is_transposed(model.layers[name].base) for name in model.shapes.targets),
        "target_modules": sorted(model.paths[name] for name in ranks) or HEAD_ALONE,
        "modules_to_save": heads or None,
        "rank_pattern": other,
        "alpha_pattern": {path: rank * alpha / slot.rank for path, rank in other.items()},  # the same scale everywhere
        **({"lora_bias": True} if biases else {}),
    }
    write_json(folder / "adapter_config.json", config)
    atomic_write(folder / "adapter_model.safetensors", pieces(tensors, {"format": "pt"}))
    atomic_write(folder / "README.md", _card(base, note, kind.auto_class, label_names).encode())


def _fold(arrays: State, names: Sequence[str], weights: Weights, model: AdaptedModel) -> tuple[State, Slot]:
    """One LoRA adapter from slots with weights w: `B = [w_1 s_1 B_1, w_2 s_2 B_2, …] / s`, `A` stacked, for the scale s
    of the result. Slots with one and the same A add up in B.

    What holds no low-rank adapter becomes one by its form: a dense slot one of full rank.
    """
    slots = [model.layout.slot(name) for name in names]
    every = {name: [_low_rank(arrays, slot, name, model) for slot in slots] for name in model.shapes.targets}
    pairs = {name: factors for name, factors in every.items() if name not in _saved_whole(model)}
    rank = max([1, *(sum(len(A) for A in {id(A): A for _, A in factors}.values()) for factors in pairs.values())])
    folded = slots[0] if len(slots) == 1 and slots[0].form is LORA else Slot("folded", rank, float(rank))
    tensors: State = {}
    for name, factors in pairs.items():
        if not sum(len(A) for _, A in factors):
            continue  # a module without ranks has no adapter
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for slot, weight, (B, A) in zip(slots, weights(name), factors, strict=True):
            B = B * (weight * (slot.scale / folded.scale))
            sums[id(A)] = (sums[id(A)][0] + B if id(A) in sums else B, A)
        path = PREFIX + model.paths[name]
        tensors[f"{path}.lora_A.weight"] = torch.cat([A for _, A in sums.values()], 0)
        tensors[f"{path}.lora_B.weight"] = torch.cat([B for B, _ in sums.values()], 1)
    for name in _saved_whole(model):
        path, base = PREFIX + model.paths[name], model.layers[name].base
        changes: dict[str, list[Tensor]] = {"weight": [], "bias": []}
        for slot, weight in zip(slots, weights(name), strict=True):
            if name in slot.adapted(model.shapes):
                B, A = _low_rank(arrays, slot, name, model)
                changes["weight"] += [weight * slot.scale * (B @ A)] * bool(len(A))
                offset = slot.form.offset(_arrays_of(arrays, slot, name))
                changes["bias"] += [] if offset is None else [weight * slot.scale * offset]
            else:
                dense = {part: arrays.get(join(slot.name, name, part)) for part in changes}
                for part, change in dense.items():
                    changes[part] += [] if change is None else [weight * change]
        for part, terms in changes.items():
            if terms and getattr(base, part, None) is None:
                raise ModelError(f"PEFT holds no {part} of {model.paths[name]}, which has none of its own")
            if terms:
                tensors[f"{path}.{part}"] = getattr(base, part).detach().cpu().float() + sum(terms)
    return tensors, folded


def _saved_whole(model: AdaptedModel) -> list[str]:
    """The wrapped modules that are saved whole where anything of them is: the task head's, and new ones."""
    return [name for name, path in model.paths.items() if _part(path, model)]


def _part(path: str, model: AdaptedModel) -> str:
    """The path of the child of the head, or of the new module, that this one is part of; empty for others."""
    parts = {*head_children(model.backbone), *model.new}
    return next((part for part in parts if path == part or path.startswith(f"{part}.")), "")


def _low_rank(arrays: State, slot: Slot, name: str, model: AdaptedModel) -> tuple[Tensor, Tensor]:
    """B and A of a slot at a module, both empty where it is on other modules."""
    if name in slot.adapted(model.shapes):
        return slot.form.low_rank(_arrays_of(arrays, slot, name))
    shape = model.shapes.targets[name]
    return torch.zeros(shape.d_out, 0), torch.zeros(0, shape.d_in)


def _biases(arrays: State, names: Sequence[str], weights: Weights, model: AdaptedModel, scale: float) -> State:
    """What the slots add whatever the input, as biases of PEFT's B, for all modules; empty where they add nothing."""
    tensors: State = {}
    has_biases = False
    for name in (target for target in model.shapes.targets if target not in _saved_whole(model)):
        total = torch.zeros(model.shapes.targets[name].d_out)
        for slot, weight in zip(map(model.layout.slot, names), weights(name), strict=True):
            adapted = name in slot.adapted(model.shapes)
            offset = slot.form.offset(_arrays_of(arrays, slot, name)) if adapted else None
            if offset is not None:
                has_biases, total = True, total + weight * slot.scale / scale * offset
        tensors[f"{PREFIX}{model.paths[name]}.lora_B.bias"] = total
    return tensors if has_biases else {}


def _arrays_of(arrays: State, slot: Slot, name: str) -> State:
    """The arrays of a slot at a module, by factor, with those of the slot that it builds on."""
    saved: State = {}
    for holder in (slot.form.basis, slot.name):
        prefix = join(holder, name, "")
        saved |= {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    return saved


def cut_ranks(tensors: State, config: Mapping[str, Any], rank: int) -> tuple[State, dict[str, Any], float]:
    """A PEFT LoRA checkpoint, and the entries of its adapter_config.json, at `rank` at most.

    Every module's update becomes its best approximation of that rank, with the scale in its factors, as balanced as
    `Spectrum.balanced`; no module's matrix is formed. The last number is the share of the squared Frobenius norm of all
    updates that is left. Everything else, such as a head, stays as it is.
    """
    cut, lower, kept, total = dict(tensors), dict[str, int](), 0.0, 0.0
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        stem = key.removesuffix(".lora_A.weight")
        path = stem.removeprefix(PREFIX)
        ranks = config["rank_pattern"].get(path, config["r"])
        scale = config["alpha_pattern"].get(path, config["lora_alpha"]) / (
            math.sqrt(ranks) if config.get("use_rslora") else ranks
        )
        parts = spectrum((tensors[f"{stem}.lora_B.weight"] * scale, tensors[key]), rank)
        B, A = parts.balanced()
        cut |= {f"{stem}.lora_B.weight": B.float().contiguous(), key: A.float().contiguous()}
        if (bias := tensors.get(f"{stem}.lora_B.bias")) is not None:
            cut[f"{stem}.lora_B.bias"] = scale * bias
        if len(A) < rank:
            lower[path] = len(A)
        kept, total = kept + float(parts.sigma[:rank].square().sum()), total + float(parts.sigma.square().sum())
    scaled_in = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": lower, "alpha_pattern": lower}
    return cut, scaled_in, kept / total if total else 1.0


def saved_modules(arrays: State, slots: Sequence[str], model: AdaptedModel) -> list[str]:
    """The modules that hold a trained head or are new. PEFT saves a child whole: it takes no parts of one."""
    trained = {split(key)[1] for key in arrays if slot_of(key) in slots and split(key)[2] != "lambda"}
    return sorted({*model.new, *(_part(model.paths[name], model) for name in _saved_whole(model) if name in trained)})


def head_tensors(heads: list[str], model: AdaptedModel) -> State:
    """Everything in these children as the backbone has it, by PEFT's names."""
    wrapped = {f"{model.paths[name]}.base.": f"{model.paths[name]}." for name in _saved_whole(model)}
    tensors: State = {}
    for head in heads:
        for path, tensor in model.backbone.get_submodule(head).state_dict(prefix=f"{head}.").items():
            for inside, outside in wrapped.items():
                path = outside + path.removeprefix(inside) if path.startswith(inside) else path
            tensors[PREFIX + path] = tensor.detach().cpu()
    return tensors


def _check_worth_writing(tensors: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(f"not writing {folder}: {name} holds numbers that are not finite")


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D keeps its weight as (d_in, d_out)."""
    return hasattr(module, "nf") and hasattr(module, "nx")


def _card(base: str, note: str, loader: str, label_names: Sequence[str]) -> str:
    labels = {index: name for index, name in enumerate(label_names)}
    shown = repr(labels).replace("`", "\\x60")  # no label ends the block of code
    more = f",\n    num_labels={len(labels)}, ignore_mismatched_sizes=True,\n    id2label={shown},\n" if labels else ""
    return (
        f"---\nlibrary_name: peft\nbase_model: {json.dumps(base)}\ntags:\n- lora\n- befit\n---\n\n"
        f"# LoRA adapter\n\n{note.strip()}\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import {loader}\n\n"
        f"base = {loader}.from_pretrained({json.dumps(base)}{more})\n"
        'model = PeftModel.from_pretrained(base, "this folder").eval()\n```\n\n'
        "The base model is named as where the adapter was trained; give your own path or hub id.\n"
    )
