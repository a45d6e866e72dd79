"""FedRot-LoRA (Zhang et al. 2026): clients' factors are turned towards those of the last round, then averaged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from befit.adapters.keys import pairs_of
from befit.adapters.layout import lora
from befit.core.schema import within
from befit.core.values import ClientWeights, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.ranked import Ranked
from befit.protocol.registry import register


@register("fedrot_lora", title="FedRot-LoRA", paper="arXiv:2602.23638", year=2026)
def fedrot_lora(
    rank: int = 8,
    alpha: float = 16.0,
    strength: Annotated[float, within(0, 1)] = 1.0,
    weights: ClientWeights = "examples",
) -> Ranked:
    """Average factors that are turned to fit those that the round started from; no client's product changes by that.

    rank      rank of the adapter
    alpha     its scaling: delta = alpha / rank * B A
    strength  lambda: 1 turns all the way, and may reflect; less turns less, and only rotates; 0 is FedIT
    weights   "examples" weighs a client by its training examples, "uniform" gives all the same

    `B = sum_k p_k B_k R_k`, `A = sum_k p_k R_k^T A_k`, `R_k R_k^T` the identity: in even rounds `R_k^T A_k` is nearest
    to the A of the round's start, from round 3 on in odd ones `B_k R_k` to its B; round 1 turns nothing: B = 0 there.
    up = down = r(d_in + d_out) per module. Deviation: the server turns, where clients do in the released code.

    Source: Zhang et al. 2026, Theorem 4.1; haoran-zh/FedRot-LoRA, federatedscope/rotation_alignment_tools.py and
    federatedscope/core/workers/client.py; docs/methods/fedrot_lora.md.
    """
    return Ranked(lora(rank, alpha), RotatedMean(strength, Merge(weights)))


@dataclass(frozen=True)
class RotatedMean:
    """What clients go on from: the mean of factors, each client's turned to fit what the round started from."""

    strength: float
    mean: Merge

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State:
        turned = [replace(update, payload=Payload(self._turned(update.payload.arrays, context))) for update in updates]
        return self.mean(turned, context)

    def _turned(self, arrays: State, context: MergeContext) -> State:
        if context.round == 1 or self.strength == 0:
            return arrays
        turned = dict(arrays)
        for key, other in pairs_of(arrays):
            A, B = arrays[key].double(), arrays[other].double()  # so that rounding does not depend on where arrays lie
            toward = context.start[key].double(), context.start[other].double()
            fits = A @ toward[0].T if context.round % 2 == 0 else B.T @ toward[1]  # (r, r)
            R = rotation(fits, self.strength)
            turned[key], turned[other] = (R.T @ A).to(arrays[key].dtype), (B @ R).to(arrays[key].dtype)
        return turned


def rotation(fits: Tensor, strength: float) -> Tensor:
    """(r, r), orthogonal: where the strength is 1, `U V^T` of `U S V^T = X Y^T`, which brings `R^T X` nearest to Y;
    below, the orthogonal matrix nearest to `(1 - strength) I + strength R`, with R of determinant 1. In float64.

    fits  `X Y^T`
    """
    U, _, Vh = torch.linalg.svd(fits.double())
    if strength == 1:
        return U @ Vh
    Vh[-1] *= torch.linalg.det(U @ Vh).sign()  # the least of the directions turns back: no reflection
    middle = (1 - strength) * torch.eye(len(U), dtype=U.dtype) + strength * (U @ Vh)
    U, _, Vh = torch.linalg.svd(middle)
    return U @ Vh
