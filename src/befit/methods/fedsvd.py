"""FedSVD (Lee et al. 2025b): only B is trained and sent, and the server gives its product with A new factors."""

from dataclasses import dataclass

from befit.adapters.keys import factor, pairs_of, slot
from befit.adapters.layout import lora
from befit.adapters.lowrank import spectrum, widened
from befit.core.values import ClientWeights, State
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import Broadcast
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedsvd", title="FedSVD", paper="arXiv:2505.12805", year=2025)
def fedsvd(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Recipe:
    """Train and average B beside a common A, which is the orthonormal right factor of what was learnt so far.

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `B' = sum_k p_k B_k`, `B' A = U S V^T`, then `B = U S` and `A = V^T`: the same product, and `A A^T` the identity.
    up = r d_out per module, down = r(d_in + d_out); with nothing but a head, up = down. A task head travels with B.
    Deviation: directions in which B' A is zero keep rows of A that are orthonormal to the others.

    Source: Lee et al. 2025b, Algorithm 1; seanie12/fed-svd, misc/utils.py; docs/methods/fedsvd.md.
    """
    shared, B = slot("shared"), slot("shared") & ~factor("A")
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(B, ("shared",)),),
        share=B,
        merge=Merge(weights),
        route=Broadcast(beside=shared),
        after=Refactor(),
        use=Use(("shared",)),
    )


@dataclass(frozen=True)
class Refactor:
    """`B A = U S V^T` with `B = U S` and `A = V^T`, module by module."""

    def step(self, server: State, merged: State) -> State:
        after = dict(merged)
        for key, other in pairs_of(merged):
            A = merged[key]
            B, rows = widened(spectrum((merged[other], A)).in_B(), len(A))
            after[other], after[key] = B.to(A.dtype), rows.to(A.dtype)
        return after
