"""LoRA-FAIR (Bian et al. 2025a): the mean of B is corrected, so that its product with that of A is nearer to the mean
update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from befit.adapters.keys import pairs_of, slot
from befit.adapters.layout import lora
from befit.adapters.lowrank import Pair, product_norm, stack
from befit.core.schema import POSITIVE, Mark, at_least
from befit.core.values import ClientWeights, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass

# Below this, one minus a cosine is rounding. Where B A is short, a step overshoots, and would make a correction of it.
_ROUNDING = 1e-12


@register("lora_fair", title="LoRA-FAIR", paper="arXiv:2411.14961", year=2025)
def lora_fair(
    rank: int = 8,
    alpha: float = 16.0,
    decay: Annotated[float, Mark.SERVER, at_least(0)] = 0.01,
    server_steps: Annotated[int, Mark.SERVER, at_least(1)] = 1000,
    server_lr: Annotated[float, Mark.SERVER, POSITIVE] = 0.01,
    weights: ClientWeights = "examples",
) -> Recipe:
    """Average A and B, and move B so that its product with A points where the mean of the products does.

    rank          rank of the adapter
    alpha         its scaling: delta = alpha / rank * B A
    decay         lambda: how dear a move of B is
    server_steps  steps of gradient descent that the server takes for each module in a round
    server_lr     their size
    weights       "examples" weighs a client by its training examples, "uniform" gives all the same

    `A = sum_k p_k A_k`, `B = sum_k p_k B_k + C`,
    `C = argmin 1 - cos(sum_k p_k B_k A_k, (sum_k p_k B_k + C) A) + decay ||C||^2`, by steps from C = 0.
    up = down = r(d_in + d_out) per module: the same as FedIT's.

    Source: Bian et al. 2025a, Figure 1; minhdn2k2/FL_LoRA, servers/serverlorafair.py; nclabteam/FedProC,
    strategies/LoRA_FAIR.py; docs/methods/lora_fair.md.
    """
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",)),),
        share=slot("shared"),
        merge=CorrectedMean(decay, server_steps, server_lr, Merge(weights)),
        use=Use(("shared",)),
    )


@dataclass(frozen=True)
class CorrectedMean:
    """The mean of factors, with B corrected; see `lora_fair` for the fields."""

    decay: float
    steps: int
    lr: float
    mean: Merge
    individual: bool = True

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State:
        merged = self.mean(updates, context)
        shares = [share / len(updates) for share in self.mean.shares(updates)]
        for key, other in pairs_of(merged):
            pairs = [(u.payload.arrays[other].double(), u.payload.arrays[key].double()) for u in updates]
            B = corrected((merged[other].double(), merged[key].double()), stack(pairs, shares), self)
            merged[other] = B.to(merged[other].dtype)
        return merged


def corrected(pair: Pair, wanted: Pair, how: CorrectedMean) -> Tensor:
    """B after the steps, (d_out, r) in float64; where a product is zero or points the right way already, B as it is.

    pair    the means of B and of A; wanted  two factors of the mean update D, of any rank

    With `G = A A^T = L L^T` and `M = D A^T`, `<D, X A> = <M, X>` and `||X A|| = ||X L||`. Every step stays in the span
    of M and B. With an orthonormal basis U of it, `X = U Y`, and Y (2 r, r) is all that moves.
    """
    B, A = pair
    P, Q = wanted
    rank, far = B.shape[1], product_norm(wanted)
    if not far > 0:
        return B
    L = torch.linalg.qr(A.T).R.T
    U, R = torch.linalg.qr(torch.cat([P @ (Q @ A.T) / far, B], 1))  # M and B may depend on each other
    toward, start = R.split(rank, 1)
    Y = start
    for step in range(how.steps):
        YL = Y @ L
        length = float(YL.norm())
        if not length > 0:
            return B
        cosine = float((toward * Y).sum()) / length
        if not step and 1 - cosine < _ROUNDING:
            return B
        Y = Y + how.lr * ((toward - cosine * (YL @ L.T) / length) / length - 2 * how.decay * (Y - start))
    return U @ Y
