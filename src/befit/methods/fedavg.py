"""FedAvg (McMahan et al. 2017) of all weights: full fine-tuning in a federation, without adapters."""

from typing import Annotated

from befit.adapters.keys import slot
from befit.adapters.layout import whole
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedavg", title="FedAvg, all weights", paper="arXiv:1602.05629", year=2017)
def fedavg(lr_scale: Annotated[float, POSITIVE] = 0.1, weights: ClientWeights = "examples") -> Recipe:
    """Average all weights over clients every round: one fully fine-tuned model for all (up = down = every parameter).

    lr_scale  multiple of train.lr at which the weights learn, since adapters want larger steps than whole models
    weights   "examples" weighs a client by its training examples, "uniform" gives all the same

    What travels and is kept is the difference `D` from the backbone, of which `W + D` is computed: 4 bytes a parameter,
    each way and round.

    Source: McMahan et al. 2017, Algorithm 1; Lee et al. 2025a, Tables 1, 2, 8 and 9; docs/methods/fedavg.md.
    """
    shared = slot("shared")
    return Recipe(
        layout=whole("shared"),
        passes=(Pass(shared, ("shared",), rates=((shared, lr_scale),)),),
        share=shared,
        merge=Merge(weights),
        use=Use(("shared",)),
    )
