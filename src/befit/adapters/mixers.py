"""How the active slots of a layer become one output. A mixer is `(layer, x, dropped, y) -> y`.

Methods say which by a value, a `Mix`: "sum"; "gate", the layout's; "logits", where slots do not meet in any layer (see
`LogitsMixer`); `Weighted`, numbers of the method's; or `ByInput`, by each input (see
`befit.adapters.instance`).

x        (…, d_in) float32 input of the layer; `dropped` is x after the adapters' dropout
y        (…, d_out) output of the frozen module, in the backbone's dtype, which the result keeps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from befit.adapters.gates import Gate
from befit.adapters.instance import InstanceMixer
from befit.adapters.keys import slot_of, split
from befit.adapters.layer import Mixed, Mixer, SlotLinear, add_up, weigh_up
from befit.adapters.layout import Layout
from befit.core.errors import ModelError
from befit.core.values import State

Weights = Callable[[str], tuple[float, ...]]


@dataclass(frozen=True)
class Weighted:
    """Every active slot at a fixed weight, in the order of the slots."""

    weights: tuple[float, ...]

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        return weigh_up(layer, self.weights, x, dropped, y)

    def __str__(self) -> str:
        return " ".join(["weighted", *(f"{weight:g}" for weight in self.weights)])


@dataclass(frozen=True)
class ByInput:
    """Two slots, by how like an input is to the client's own: see `befit.adapters.instance.InstanceMixer`."""

    limit: float
    direction: Literal["similar", "reference"]

    def __str__(self) -> str:
        return f"instance {self.limit:g} {self.direction}"


Mix = Literal["sum", "gate", "logits"] | Weighted | ByInput


def check_mix(mix: Mix) -> None:
    """Raise ValueError for what is no way to mix slots."""
    if not isinstance(mix, Weighted | ByInput) and mix not in ("sum", "gate", "logits"):
        raise ValueError(f"no mixer {mix!r}; there are sum, gate, logits, Weighted and ByInput")


def plain_mix(mix: Mix) -> Any:
    """As JSON can hold it: a name, or the fields of a value."""
    return mix if isinstance(mix, str) else asdict(mix)


def mix_from(plain: Any) -> Mix:
    """What `plain_mix` was given.

    >>> mix_from(plain_mix(Weighted((0.25, 0.75)))), mix_from("gate")
    (Weighted(weights=(0.25, 0.75)), 'gate')
    """
    if not isinstance(plain, Mapping):
        return plain
    return Weighted(tuple(plain["weights"])) if "weights" in plain else ByInput(**plain)


def make_mixer(mix: Mix, model: Mixed, gate: Gate) -> Mixer:
    """The mixer for a model whose layout has this gate. Raises ValueError for an unknown one."""
    check_mix(mix)
    if isinstance(mix, Weighted):
        return mix
    if isinstance(mix, ByInput):
        return InstanceMixer(model, mix.limit, mix.direction)
    if mix == "gate":
        return gate
    return LogitsMixer(model) if mix == "logits" else add_up


def forward_passes(mix: Mix, slots: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The slots in each pass of the backbone over a batch: all in one, or one for each where their logits add up.

    >>> forward_passes("sum", ("shared", "personal")), forward_passes("logits", ("shared", "personal"))
    ((('shared', 'personal'),), (('shared',), ('personal',)))
    """
    return tuple((slot,) for slot in slots) if mix == "logits" else (slots,)


def constant_weights(mix: Mix, layout: Layout, slots: Sequence[str], arrays: State) -> Weights | None:
    """The slots' weights at each layer, by its name, in the order of `slots`; None where they depend on the input."""
    if isinstance(mix, Weighted):
        return lambda layer: mix.weights
    if mix == "sum":
        return lambda layer: (1.0,) * len(slots)
    if mix != "gate":
        return None
    gates = {split(key)[1]: layout.gate.constants(array) for key, array in arrays.items() if slot_of(key) == "gate"}
    by_layer = {layer: weights for layer, weights in gates.items() if weights is not None}
    return by_layer.__getitem__ if by_layer and len(by_layer) == len(gates) else None


def gate_values(mix: Mix, layout: Layout, slots: Sequence[str], arrays: State) -> dict[str, float]:
    """By layer, what a gate of one number gives the last of the active slots, to six digits; nothing for others."""
    weights = constant_weights(mix, layout, slots, arrays) if mix == "gate" else None
    if weights is None:
        return {}
    layers = [split(key)[1] for key in arrays if slot_of(key) == "gate"]
    return {layer: float(f"{weights(layer)[-1]:.6g}") for layer in layers}


class LogitsMixer:
    """`z(x) = sum_s z_s(x)`, with `z_s` the logits of the backbone and slot s alone; a sum, not a mean (FedSim).

    The batch goes through the backbone once for each slot, all copies side by side in one forward pass: copy s sees
    slot s alone, from the first layer to the last. So there is no state to switch between forward and backward pass,
    which activation checkpointing would undo, and a cache of keys and values holds a stream for each slot by itself.
    A forward pass takes as many copies of the batch as there are active slots, and that much memory.
    """

    def __init__(self, model: Mixed) -> None:
        self._model = model

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        slots = layer.router.active
        if len(x) % len(slots):
            raise ModelError(
                f"{layer.name} sees an input of shape {tuple(x.shape)} for {len(slots)} copies of a "
                "batch; adding logits up needs the copies in the first dimension"
            )
        parts = []
        for slot, *copy in zip(slots, *(value.chunk(len(slots)) for value in (x, dropped, y)), strict=True):
            output = layer.branch_output(slot, copy[0], copy[1])
            scale = layer.branches[slot].scale if output is not None else 0.0
            parts.append(copy[2] if output is None else torch.add(copy[2], output.to(y.dtype), alpha=scale))
        return torch.cat(parts)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy what goes into every forward pass of the whole model, and add up the logits that come out."""
        backbone = self._model.backbone
        handles = [
            backbone.register_forward_pre_hook(self._copied, with_kwargs=True),
            backbone.register_forward_hook(self._added),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _copied(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._model.mixer is not self:  # a teacher's pass inside this one
            return args, kwargs
        count = len(self._model.active_slots)
        return tuple(_times(value, count) for value in args), {
            key: _times(value, count) for key, value in kwargs.items()
        }

    def _added(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._model.mixer is self:
            output.logits = torch.stack(output.logits.chunk(len(self._model.active_slots))).sum(0)
        return output


def _times(value: Any, count: int) -> Any:
    """The copies one after the other, so that a module which folds images or tokens into the batch keeps them apart."""
    return torch.cat([value] * count) if isinstance(value, Tensor) and value.dim() else value
