"""RoLoRA (Chen et al. 2025): rounds take turns, one trains and shares B alone, the next A alone."""

from befit.adapters.keys import factor, slot
from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import Broadcast
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("rolora", title="RoLoRA", paper="arXiv:2502.01755", year=2025)
def rolora(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Recipe:
    """Train and average B in odd rounds and A in even ones: every average is exact, and both factors learn.

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    Rounds 1, 3, ...: `B <- sum_k p_k B_k` beside the common A; 2, 4, ...: `A <- sum_k p_k A_k` beside the common B.
    B comes first, for beside B = 0 no gradient reaches A. up = r d_out or r d_in per module in turn, down = both; where
    a module is square, up = down / 2. A task head travels in every round.

    Source: Chen et al. 2025, Algorithm 1; minhdn2k2/FL_LoRA, utils/utils_model.py and servers/serverrolora.py;
    docs/methods/rolora.md.
    """
    shared = slot("shared")
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(shared, ("shared",)),),
        share=shared,
        turns=(~factor("A"), ~factor("B")),
        merge=Merge(weights),
        route=Broadcast(beside=shared),
        use=Use(("shared",)),
    )
