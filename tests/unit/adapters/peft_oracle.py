"""The same adapters on a fresh backbone, once by PEFT and once as a dense change of the weights."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor, nn

from befit.adapters.keys import join
from befit.adapters.model import AdaptedModel
from befit.core.values import State
from tests.tiny import tiny_model


def peft_model(kind: str, model: AdaptedModel, state: State, *slots: str) -> Any:
    """PEFT's model of `kind` with one adapter per slot, all of them active and trainable."""
    made: Any = None
    for name in slots:
        slot = model.layout.slot(name)
        config = peft.LoraConfig(
            r=slot.rank,
            lora_alpha=slot.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=[model.paths[target] for target in model.shapes.targets],
            modules_to_save=[model.paths[head] for head in model.shapes.heads] if slot.head else None,
            fan_in_fan_out=kind == "gpt2",
        )
        if made is None:
            made = peft.get_peft_model(tiny_model(kind), config, adapter_name=name)
        else:
            made.add_adapter(name, config)
    made.base_model.set_adapter(list(slots))
    with torch.no_grad():
        for key, parameter in parameters_of(made, model, *slots).items():
            if key.endswith(("/A", "/B")):
                parameter.copy_(state[key])
            else:
                parameter.add_(state[key])  # befit keeps the change of a head, PEFT the head
    return made.eval()


def parameters_of(made: Any, model: AdaptedModel, *slots: str) -> dict[str, nn.Parameter]:
    """PEFT's parameters by befit's keys."""
    found: dict[str, nn.Parameter] = {}
    for name in slots:
        for target in model.shapes.targets:
            layer = made.base_model.model.get_submodule(model.paths[target])
            found[join(name, target, "A")] = layer.lora_A[name].weight
            found[join(name, target, "B")] = layer.lora_B[name].weight
        for head in model.shapes.heads if model.layout.slot(name).head else ():
            layer = made.base_model.model.get_submodule(model.paths[head])
            copy = layer.modules_to_save[name]
            found[join(name, head, "weight")], found[join(name, head, "bias")] = copy.weight, copy.bias
    return found


def dense_model(kind: str, model: AdaptedModel, state: State, *slots: str) -> nn.Module:
    """A fresh backbone whose own weights hold the sum of the slots: `W + sum_s scale_s B_s A_s`."""
    fresh = tiny_model(kind)
    with torch.no_grad():
        for name in slots:
            slot = model.layout.slot(name)
            for target in model.shapes.targets:
                layer = fresh.get_submodule(model.paths[target])
                delta = slot.scale * state[join(name, target, "B")] @ state[join(name, target, "A")]
                assert isinstance(layer.weight, Tensor)
                layer.weight.add_(delta.T if kind == "gpt2" else delta)
            for head in model.shapes.heads if slot.head else ():
                layer = fresh.get_submodule(model.paths[head])
                assert isinstance(layer.weight, Tensor) and isinstance(layer.bias, Tensor)
                layer.weight.add_(state[join(name, head, "weight")])
                layer.bias.add_(state[join(name, head, "bias")])
    return fresh
