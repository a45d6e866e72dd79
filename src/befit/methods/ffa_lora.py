"""FFA-LoRA (Sun et al. 2024): A stays at its random start, only B is trained and shared."""

from befit.adapters.keys import factor, slot
from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("ffa_lora", title="FFA-LoRA", paper="arXiv:2403.12313", year=2024)
def ffa_lora(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Recipe:
    """Freeze A at the values that the common seed gives, train and average B (up = down = r d_out per module).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    All clients have one A, so the mean of B is the mean of the products. A task head travels with B.

    Source: Sun et al. 2024, sections 3 and 4; Guo et al. 2025, Figure 1b; docs/methods/ffa_lora.md.
    """
    shared = slot("shared") & ~factor("A")
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(shared, ("shared",)),),
        share=shared,
        merge=Merge(weights),
        use=Use(("shared",)),
    )
