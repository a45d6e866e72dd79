"""FediLoRA (Yang et al. 2025): each rank is averaged over the clients that have it, and a client's most foreign module
is drawn back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.adapters.layout import lora
from befit.core.schema import within
from befit.core.values import ClientWeights, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.ranked import Ranked, rank_of
from befit.protocol.registry import register


@register("fedilora", title="FediLoRA", paper="arXiv:2509.06984", year=2025)
def fedilora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: dict[str, int] | None = None,
    edit_below: Annotated[float, within(-1, 1)] = 0.95,
    weights: ClientWeights = "examples",
) -> Ranked:
    """Average each row of A and column of B over the clients whose rank reaches it, so that padding dilutes nothing.

    rank        the largest rank
    alpha       scaling at every rank: delta = alpha / rank * B A
    ranks       rank by pattern of client ids, such as {"phone-*": 2}; null: everybody has the largest
    edit_below  from round 2 on, the A of a client that has the smallest cosine with the A its round started from is
                drawn back to that where the cosine is below this; -1: never
    weights     "examples" weighs a client by its training examples, "uniform" gives all the same

    `A[j] = sum_{k: r_k > j} p_k A_k[j] / sum_{k: r_k > j} p_k`, the columns of B likewise; before that, in one module
    of each client, `A_k <- c A_k + (1 - c) A`, `c = cos(A_k, A)` over its first r_k ranks. Clients take those.
    up = down = r(d_in + d_out) per module, r the largest rank. Deviation: the scale is the same at every rank, arrays
    travel at the largest, zero beyond a client's own; the server edits, where clients do in the released code.

    Source: Yang et al. 2025, FediLoRA; gotobcn8/FediLoRA, fed_utils/model_aggregation.py and fed_utils/server.py;
    docs/methods/fedilora.md.
    """
    return Ranked(lora(rank, alpha), MeanOfRanks(rank, ranks or {}, edit_below, Merge(weights)), ranks or {})


@dataclass(frozen=True)
class MeanOfRanks:
    """The mean of every rank over those that have it; see `fedilora` for the fields."""

    rank: int
    ranks: Mapping[str, int]
    edit_below: float
    mean: Merge

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State:
        ranks = [rank_of(update.client.id, self.ranks, self.rank) for update in updates]
        if context.round > 1:
            edited = (self._edited(u.payload.arrays, context.start, r) for u, r in zip(updates, ranks, strict=True))
            updates = [replace(update, payload=Payload(arrays)) for update, arrays in zip(updates, edited, strict=True)]
        has = torch.tensor(ranks)[:, None] > torch.arange(self.rank)  # (clients, rank)
        shares = torch.tensor(self.mean.shares(updates), dtype=torch.float64) / len(updates)
        covered = shares @ has.double()  # (rank,)
        merged = self.mean(updates, context)
        for key, value in merged.items():
            factor = split(key)[2]
            if factor in ("A", "B"):
                by_rank, start = (value, context.start[key]) if factor == "A" else (value.T, context.start[key].T)
                mean = (by_rank / covered[:, None]).to(value.dtype)
                kept = torch.where(covered[:, None] > 0, mean, start)  # a rank that nobody has here stays
                merged[key] = kept if factor == "A" else kept.T.contiguous()
        return merged

    def _edited(self, arrays: State, start: Mapping[str, Tensor], rank: int) -> State:
        """One A nearer to the start."""
        cosines = {
            key: _cosine(value[:rank], start[key][:rank]) for key, value in arrays.items() if split(key)[2] == "A"
        }
        key = min(cosines, key=cosines.__getitem__)
        c = cosines[key]
        if c >= self.edit_below:
            return arrays
        edited = c * arrays[key]
        edited[:rank] += (1 - c) * start[key][:rank]
        return {**arrays, key: edited}


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.cosine_similarity(first.double().flatten(), second.double().flatten(), dim=0))
