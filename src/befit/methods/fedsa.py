"""FedSA-LoRA (Guo et al. 2025): both factors are trained, only A is shared."""

from befit.adapters.keys import factor, slot
from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedsa", title="FedSA-LoRA", paper="arXiv:2410.01463", year=2025)
def fedsa(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Recipe:
    """Train A and B, average A, keep B and the task head at the client (up = down = r d_in per module).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    Source: Guo et al. 2025, Figure 1c; docs/methods/fedsa.md.
    """
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",)),),
        share=slot("shared") & factor("A"),
        merge=Merge(weights),
        use=Use(("shared",)),
    )
