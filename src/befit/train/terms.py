"""Guidance terms: what a pass adds to the task's loss. A term is bound once per update and then called per batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from befit.adapters.keys import slot, to_slot

if TYPE_CHECKING:
    from befit.site import Site

__all__ = ["L2", "Term"]


class Term(Protocol):
    """`bind` is called before the first batch, when the model holds what the client received."""

    def bind(self, site: Site) -> Callable[[], Tensor]: ...


@dataclass(frozen=True)
class L2:
    """`weight * sum ||theta_slot - theta_to||^2` over all entries, with `to` as it was at the start of the update.

    No factor 1/2 and no average over entries, as in the FedMosaic specification, section 5 (Ditto).
    """

    slot: str
    to: str
    weight: float

    def bind(self, site: Site) -> Callable[[], Tensor]:
        leaves = site.model.leaves(slot(self.slot))
        targets = [site.model.leaves(slot(self.to))[to_slot(key, self.to)].detach().clone() for key in leaves]
        values = list(leaves.values())

        def penalty() -> Tensor:
            squares = [(value - target).square().sum() for value, target in zip(values, targets, strict=True)]
            return self.weight * torch.stack(squares).sum()

        return penalty
