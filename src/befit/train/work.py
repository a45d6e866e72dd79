"""What a step of local training computes, as values that estimates can count."""

from __future__ import annotations

from dataclasses import dataclass

from befit.adapters.keys import NOTHING, Selector

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """One pass of the model over a batch, in one step of local training.

    active     slots in the forward pass
    trainable  what gets gradients; nothing for a forward pass alone, such as a teacher's
    times      how often it happens in a step; 0.1 for once in ten
    """

    active: tuple[str, ...]
    trainable: Selector = NOTHING
    times: float = 1.0
