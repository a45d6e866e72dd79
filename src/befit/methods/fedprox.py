"""FedProx (Li et al. 2020): federated averaging with a pull back to where the round started."""

from typing import Annotated

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.schema import at_least
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass
from befit.train.terms import L2


@register("fedprox", title="FedProx", paper="arXiv:1812.06127", year=2020)
def fedprox(
    rank: int = 8,
    alpha: float = 16.0,
    mu: Annotated[float, at_least(0)] = 0.01,
    weights: ClientWeights = "examples",
) -> Recipe:
    """Average A and B; clients add mu / 2 ||theta - theta_start||^2 to their loss (up = down = r(d_in + d_out)).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    mu       strength of the pull; 0 is FedIT
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    up = down = r(d_in + d_out) per module.

    Source: Li et al. 2020, eq. 2 and Algorithm 2; docs/methods/fedprox.md.
    """
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",), (L2("shared", to="shared", weight=mu / 2),) if mu else ()),),
        share=slot("shared"),
        merge=Merge(weights),
        use=Use(("shared",)),
    )
