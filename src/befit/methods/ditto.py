"""Ditto (Li et al. 2021): a personal adapter kept near the shared one."""

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


@register("ditto", title="Ditto", paper="arXiv:2012.04221", year=2021)
def ditto(
    rank: int = 8,
    alpha: float = 16.0,
    mu: Annotated[float, at_least(0)] = 0.001,
    weights: ClientWeights = "examples",
    legacy_average_personal: bool = False,
) -> Recipe:
    """Two steps a batch, one of the shared adapter and one of the personal; only the shared one travels.

    rank     rank of both adapters
    alpha    their scaling: delta = alpha / rank * B A
    mu       strength of mu * ||personal - shared||^2, shared as received at the start of the round
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same
    legacy_average_personal  average the personal adapter too, as FedMosaic's released code does by mistake

    up = down = r(d_in + d_out) per module. The default mu and the missing factor 1/2 are those of FedMosaic's released
    code; the original paper tries mu from 0.1 to 1 with the factor. Deviation: the personal adapter never leaves the
    client unless asked for, where that code averages it away every round; each adapter has an optimiser of its own, the
    personal one's kept from round to round; the penalty covers the task head too, where there is one.

    Source: Li et al. 2021, Algorithm 1; snumprlab/fedmosaic, federated_methods/perada.py and
    federated_methods/method_manager.py; docs/methods/ditto.md.
    """
    return Recipe(
        layout=lora(rank, alpha, slots=("shared", "personal")),
        passes=(
            Pass(slot("shared"), ("shared",), name="shared"),
            Pass(
                slot("personal"),
                ("personal",),
                (L2("personal", to="shared", weight=mu),),
                name="personal",
                keep_optimiser=True,
            ),
        ),
        share=slot("shared", "personal") if legacy_average_personal else slot("shared"),
        merge=Merge(weights),
        use=Use(("personal",)),
    )
