"""HETLoRA (Cho et al. 2024): clients of different ranks in one adapter, padded with zeros and weighed by their norm."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from befit.adapters.keys import pairs_of, slot
from befit.adapters.layout import lora
from befit.adapters.lowrank import product_norm
from befit.adapters.state import weighted_mean
from befit.core.schema import OPEN_SHARE, at_least
from befit.core.values import State, Update
from befit.merge.merge import Merge, MergeContext
from befit.merge.trim import kept_count
from befit.methods.parts.recipe.ranked import Ranked
from befit.protocol.registry import register
from befit.train.terms import Guide, Laned, Term

if TYPE_CHECKING:
    from befit.protocol.site import Site
    from befit.tasks.base import Batch


@register("hetlora", title="HETLoRA", paper="arXiv:2401.06432", year=2024)
def hetlora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: dict[str, int] | None = None,
    weights: Literal["norm", "examples", "uniform"] = "norm",
    decay: Annotated[float, at_least(0)] = 1e-3,
    gamma: Annotated[float, OPEN_SHARE] = 0.99,
    prune: bool = True,
) -> Ranked:
    """Average zero-padded factors by the norm of their product; a client takes its first ranks and may give some up.

    rank     the largest rank
    alpha    scaling at every rank: delta = alpha / rank * B A
    ranks    rank by pattern of client ids, such as {"phone-*": 2}; null: everybody has the largest
    weights  what the server weighs clients by: the "norm" of their update, their training "examples", or "uniform";
             with "examples", decay 0 and no pruning this is the mean of padded factors
    decay    eta, how much the last ranks are pulled to zero
    gamma    share of a client's ranks that are not among the last, below 1
    prune    give up the last ranks for good after a round in which their product became smaller

    `A = sum_k p_k A_k`, `B = sum_k p_k B_k`, `p_k = ||B_k A_k||_F / sum_m ||B_m A_m||_F` over all modules; loss
    `CE + eta ||B[:, gamma r:]|| ||A[gamma r:]||`.
    up = down = r(d_in + d_out) per module, r the largest rank. Deviation: the scale is the same at every rank, and
    arrays travel at the largest, zero beyond a client's own.

    Source: Cho et al. 2024, Figure 2; docs/methods/hetlora.md.
    """
    return Ranked(
        lora(rank, alpha),
        by_norm if weights == "norm" else Merge(weights),
        ranks or {},
        SelfPruning(decay, gamma, prune),
    )


def by_norm(updates: Sequence[Update], context: MergeContext) -> State:
    """The mean of padded factors, weighed by the norm of each client's whole update; uniform where all are zero."""
    norms = [_norm(update.payload.arrays) for update in updates]
    weights = norms if sum(norms) > 0 else [1.0] * len(norms)
    return weighted_mean((update.payload.arrays for update in updates), weights)


def _norm(state: State) -> float:
    """`sqrt(sum over modules of ||B A||_F^2)`."""
    return math.hypot(*(product_norm((state[B], state[A])) for A, B in pairs_of(state)))


@dataclass(frozen=True)
class SelfPruning:
    """Pulls the last ranks of a client to zero, and gives them up when they have begun to go."""

    decay: float
    gamma: float
    prune: bool

    def terms(self, rank: int) -> tuple[Term, ...]:
        return (RankDecay(self._kept(rank), rank, self.decay),) if self.decay and rank > 1 else ()

    def next_rank(self, rank: int, before: State, after: State) -> int:
        if not self.prune or rank == 1:
            return rank
        kept = self._kept(rank)
        return kept if float(_tail(after, kept, rank)) < float(_tail(before, kept, rank)) else rank

    def _kept(self, rank: int) -> int:
        return kept_count(self.gamma, rank)


@dataclass(frozen=True)
class RankDecay(Laned):
    """`weight * sum over modules of ||B[:, start:stop]||_F ||A[start:stop]||_F`.

    others  start and stop of the clients that follow it beside this one
    """

    start: int
    stop: int
    weight: float
    others: tuple[tuple[int, int], ...] = ()

    @property
    def alike(self) -> Hashable:
        return type(self), self.weight

    def joined(self, others: "Sequence[RankDecay]") -> "RankDecay":
        return replace(self, others=tuple((other.start, other.stop) for other in others))

    def bind(self, site: "Site") -> Guide:
        leaves = site.model.leaves(slot("shared"))

        def penalty(batch: "Batch", logits: Tensor) -> Tensor:
            return self.weight * _tail(leaves, self.start, self.stop)

        if site.model.lane_count is None:
            return penalty
        pairs = [(leaves[A], leaves[B]) for A, B in pairs_of(leaves)]
        within = torch.zeros(pairs[0][0].shape[:2], device=site.model.device)  # (lanes, rank), 1 from start to stop
        for lane, (start, stop) in enumerate([(self.start, self.stop), *self.others]):
            within[lane, start:stop] = 1

        def in_lanes(batch: "Batch", logits: Tensor) -> Tensor:
            rows, columns = within[:, :, None], within[:, None]
            norms = [(A * rows).flatten(1).norm(dim=1) * (B * columns).flatten(1).norm(dim=1) for A, B in pairs]
            return self.weight * torch.stack(norms).sum(0)

        return in_lanes


def _tail(state: State, start: int, stop: int) -> Tensor:
    """How large the last ranks are, over all modules."""
    norms = [state[A][start:stop].norm() * state[B][:, start:stop].norm() for A, B in pairs_of(state)]
    return torch.stack(norms).sum()
