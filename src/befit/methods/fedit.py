"""FedIT (Zhang et al. 2024): federated averaging of LoRA factors."""

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedit", title="FedIT", paper="arXiv:2305.05644", year=2024, standard=True)
def fedit(
    rank: int = 8,
    alpha: float = 16.0,
    weights: ClientWeights = "examples",
    keep_optimiser: bool = False,
) -> Recipe:
    """Average A and B over clients every round; one shared adapter for all (up = down = r(d_in + d_out) per module).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same
    keep_optimiser  keep the optimiser's averages at the client from round to round, as FedMosaic's authors do with
                    models that see images

    With one client it is Local, where the optimiser is kept or has nothing to keep, but for the batches, which are
    drawn by the name of the stage.

    Source: Zhang et al. 2024, Algorithm 1; Zou et al. 2026, Algorithm 1; docs/methods/fedit.md.
    """
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",), keep_optimiser=keep_optimiser),),
        share=slot("shared"),
        merge=Merge(weights),
        use=Use(("shared",)),
    )
