"""Slots that never meet inside a model: one model for each of them, whose logits add up (FedSim).

The batch goes through the backbone once for each slot, all copies side by side in one forward pass: copy s sees slot s
alone, from the first layer to the last. So there is no state to switch between forward and backward pass, which
activation checkpointing would undo, and a cache of keys and values holds a stream for each slot by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from befit.adapters.layer import SlotLinear
from befit.core.errors import ModelError

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel

__all__ = ["LogitsMixer"]


class LogitsMixer:
    """`z(x) = sum_s z_s(x)`, with `z_s` the logits of the backbone and slot s alone; a sum, not a mean.

    A forward pass takes as many copies of the batch as there are active slots, and that much memory.
    """

    def __init__(self, model: AdaptedModel) -> None:
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
