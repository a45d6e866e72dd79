"""How the active slots of a layer become one output. A mixer is `(layer, x, dropped, y) -> y`.

It is named by a word and its arguments: "sum", "gate", "weighted 0.5 0.5", "instance 0.5 similar", or "logits", where
slots do not meet in any layer: see `befit.adapters.logits`.

x        (…, d_in) float32 input of the layer; `dropped` is x after the adapters' dropout
y        (…, d_out) output of the frozen module, in the backbone's dtype, which the result keeps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.keys import slot_of, split
from befit.adapters.layer import Mixer, SlotLinear
from befit.core.errors import ModelError
from befit.core.values import State

if TYPE_CHECKING:
    from befit.adapters.layout import Layout
    from befit.adapters.model import AdaptedModel

__all__ = ["Weighted", "add_up", "constant_weights", "make_mixer", "meetings", "weigh_up"]


Weights = Callable[[str], tuple[float, ...]]


def make_mixer(text: str, model: AdaptedModel) -> Mixer:
    """The mixer of that name for a model. Raises ValueError for an unknown one."""
    kind, *arguments = text.split()
    if kind == "gate":
        return model.layout.gate
    if kind == "instance":
        from befit.adapters.instance import InstanceMixer

        limit, direction = arguments
        return InstanceMixer(model, float(limit), direction)
    if kind == "logits":
        from befit.adapters.logits import LogitsMixer

        return LogitsMixer(model)
    return _plain_mixer(kind, tuple(map(float, arguments)))


@lru_cache(maxsize=64)
def _plain_mixer(kind: str, numbers: tuple[float, ...]) -> Mixer:
    if kind == "weighted":
        return Weighted(numbers)
    if kind != "sum":
        raise ValueError(f"no mixer {kind!r}; there are sum, gate, weighted, instance and logits")
    return add_up


def meetings(text: str, slots: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The slots in each pass of the backbone over a batch: all in one, or one for each where their logits add up.

    >>> meetings("sum", ("shared", "personal")), meetings("logits", ("shared", "personal"))
    ((('shared', 'personal'),), (('shared',), ('personal',)))
    """
    return tuple((one,) for one in slots) if text == "logits" else (slots,)


def constant_weights(text: str, layout: Layout, slots: Sequence[str], arrays: State) -> Weights | None:
    """The slots' weights at each layer, by its name, in the order of `slots`; None where they depend on the input."""
    kind, *arguments = text.split()
    if kind in ("sum", "weighted"):
        same = tuple(map(float, arguments)) if arguments else (1.0,) * len(slots)
        return lambda layer: same
    if kind != "gate":
        return None
    gates = {split(key)[1]: layout.gate.constants(array) for key, array in arrays.items() if slot_of(key) == "gate"}
    found = {layer: weights for layer, weights in gates.items() if weights is not None}
    return found.__getitem__ if found and len(found) == len(gates) else None


def add_up(layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s scale_s h_s`: every active slot at full weight."""
    for slot in layer.router.active:
        output = layer.branch_output(slot, x, dropped)
        if output is not None:
            y = torch.add(y, output.to(y.dtype), alpha=layer.branches[slot].scale)
    return y


def weigh_up(layer: SlotLinear, weights: Sequence[float | Tensor], x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s m_s scale_s h_s`; a weight is a number, or (batch,) with one for each example."""
    for slot, weight in zip(layer.router.active, weights, strict=True):
        output = layer.branch_output(slot, x, dropped)
        if output is None:
            continue
        scale = layer.branches[slot].scale
        if isinstance(weight, Tensor):
            if len(weight) != len(output):
                raise ModelError(
                    f"{layer.name} sees an input of shape {tuple(x.shape)} for {len(weight)} examples; "
                    "weights by example need the examples in the first dimension"
                )
            output = output * weight.to(output.dtype).view(-1, *[1] * (output.dim() - 1))
            y = torch.add(y, output.to(y.dtype), alpha=scale)
        else:
            y = torch.add(y, output.to(y.dtype), alpha=weight * scale)
    return y


@dataclass(frozen=True)
class Weighted:
    """Every active slot at a fixed weight, in the order of the slots."""

    weights: tuple[float, ...]

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        return weigh_up(layer, self.weights, x, dropped, y)
