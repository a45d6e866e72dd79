"""A PEFT adapter that training starts from: whether it fits a method's slots, and its arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from befit.adapters.keys import join
from befit.adapters.layout import ModelShapes, Slot
from befit.adapters.model import AdaptedModel
from befit.adapters.state import rename
from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.values import State
from befit.merge.checkpoint import AdapterCheckpoint, open_checkpoint
from befit.protocol.context import Problem
from befit.protocol.method import Method
from befit.runs.peft_io import PREFIX, head_tensors, saved_modules


def read_adapter(folder: Path, model: AdaptedModel, slot: str) -> State:
    """The arrays of one slot, in float32, from a PEFT LoRA checkpoint made for this model's targets, rank and alpha.

    Raises ConfigError for what is no such checkpoint, and PayloadMismatch naming what differs.
    """
    opened, wanted = open_checkpoint(folder), model.layout.slot(slot)
    if reason := misfit(opened, wanted, model.paths, model.shapes):
        raise PayloadMismatch(f"{folder}: {reason}")
    state: State = {}
    for name in wanted.adapted(model.shapes):
        for part in ("A", "B"):
            state[join(slot, name, part)] = opened.read(f"{PREFIX}{model.paths[name]}.lora_{part}.weight").float()
    left = dict.fromkeys(opened.dense)
    for name, shape in wanted.dense(model.shapes).items():
        for part in ("weight", "bias") if shape.bias else ("weight",):
            path, base = f"{PREFIX}{model.paths[name]}.{part}", getattr(model.layers[name].base, part)
            state[join(slot, name, part)] = opened.read(path).float() - base.detach().cpu().float()
            del left[path]
    for name, value in head_tensors(saved_modules(state, (slot,), model), model).items():
        if name in left:
            found = opened.read(name)
            if not torch.equal(found, value.to(found.dtype)):
                raise PayloadMismatch(f"{folder}: {name}, which no slot trains, is not what it is in this model")
            del left[name]  # the part of a head that no slot changes
    if left:
        raise PayloadMismatch(f"{folder}: {len(left)} arrays have no place in the model, first {min(left)!r}")
    return state


def misfit(opened: AdapterCheckpoint, wanted: Slot, paths: Mapping[str, str], shapes: ModelShapes) -> str:
    """Why, by fields and shapes, a checkpoint is no adapter of this slot in a model of these shapes; else empty.

    paths  of the model's modules, by their canonical names
    """
    config, its = opened.config, f"slot {wanted.name!r}"
    root = bool(config.get("use_rslora"))
    alpha = wanted.scale * (math.sqrt(wanted.rank) if root else wanted.rank)
    if config["r"] != wanted.rank:
        return f"r is {config['r']}, {its} has {wanted.rank}"
    if not math.isclose(config["lora_alpha"], alpha, rel_tol=1e-6):
        told = f" with use_rslora, an alpha of {config['lora_alpha'] * math.sqrt(wanted.rank):.9g}" * root
        return f"lora_alpha is {config['lora_alpha']}{told}, {its} has {wanted.scale * wanted.rank:.9g}"
    for field in ("rank_pattern", "alpha_pattern"):
        if config.get(field):
            return f"{field} is {config[field]}, which {its} cannot hold"
    adapted = {paths[name]: shape for name, shape in wanted.adapted(shapes).items()}
    for path, shape in adapted.items():
        module = opened.modules.get(path)
        if module is None:
            return f"it has no adapter of {path}; its targets differ from this model's"
        if (module.d_out, module.d_in) != (shape.d_out, shape.d_in):
            return f"{path} is {module.d_out} x {module.d_in} there, {shape.d_out} x {shape.d_in} in this model"
    if more := opened.modules.keys() - adapted.keys():
        return f"it adapts {min(more)} too; its targets differ from this model's"
    for name, shape in wanted.dense(shapes).items():
        found = opened.dense.get(path := f"{PREFIX}{paths[name]}.weight")
        if found is None:
            return f"it has no {path}, which {its} trains"
        if found != (shape.d_out, shape.d_in):
            there, here = " x ".join(map(str, found)), f"{shape.d_out} x {shape.d_in}"
            return f"{path} is {there} there, {here} in this model: it answers otherwise"
        if shape.bias and f"{PREFIX}{paths[name]}.bias" not in opened.dense:
            return f"it has no {PREFIX}{paths[name]}.bias, which {its} trains"
    return ""


def start_problem(folder: Path, wanted: Slot, paths: Mapping[str, str], shapes: ModelShapes) -> str:
    """Why a slot cannot start at a folder of a PEFT adapter; see `misfit`."""
    if not (folder / "adapter_config.json").is_file():
        return f"{folder} is no folder of a PEFT adapter: it has no adapter_config.json"
    try:
        reason = misfit(open_checkpoint(folder), wanted, paths, shapes)
    except (ConfigError, PayloadMismatch) as error:
        return error.problems[0] if isinstance(error, ConfigError) else str(error)
    return f"{folder}: {reason}" if reason else ""


def start_problems(
    experiment: Experiment,
    methods: Iterable[tuple[str, Method]],
    paths: Mapping[str, str],
    shapes: ModelShapes,
) -> Iterator[tuple[str, Problem]]:
    """Why methods, by the names of their runs, cannot start at the experiment's adapter in a model of these shapes."""
    if (folder := experiment.adapter.start) is None:
        return
    for label, method in methods:
        for name in method.starting()[:1]:
            if problem := start_problem(Path(folder), method.layout.slot(name), paths, shapes):
                yield label, Problem("error", "adapter.start", problem)


def start_from(folder: Path, model: AdaptedModel, slots: Sequence[str]) -> None:
    """Let slots of one rank and scale start at a PEFT adapter. Raises ConfigError where it is another's."""
    problem = start_problem(folder, model.layout.slot(slots[0]), model.paths, model.shapes)
    try:
        adapter = {} if problem else read_adapter(folder, model, slots[0])
    except PayloadMismatch as error:
        problem, adapter = str(error), {}
    if problem:
        raise ConfigError([f"adapter.start: {problem}"])
    model.start_from({key: value for name in slots for key, value in rename(adapter, name).items()})
