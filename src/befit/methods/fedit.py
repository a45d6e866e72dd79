"""FedIT (Zhang et al. 2024): federated averaging of LoRA factors."""

from typing import Literal

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.merge.merge import Merge
from befit.recipe.personal import Use
from befit.recipe.recipe import Recipe
from befit.registry import register
from befit.train.loop import Pass


@register("fedit", title="FedIT", paper="arXiv:2305.05644", year=2023, standard=True)
def fedit(rank: int = 8, alpha: float = 16.0, weights: Literal["examples", "uniform"] = "examples") -> Recipe:
    """Average A and B over clients every round; one shared adapter for all (up = down = r(d_in + d_out) per module).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    Source: specification potara.md, section 5.2.
    """
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",)),),
        share=slot("shared"),
        merge=Merge(weights),
        use=Use(("shared",)),
    )
