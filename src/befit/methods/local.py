"""Local training: every client alone, the baseline that federating has to beat."""

from typing import Annotated

from befit.adapters.keys import factor
from befit.adapters.layout import Layout, Slot, lora
from befit.adapters.pq import BASIS, Basis, PQLora
from befit.core.schema import POSITIVE, at_least
from befit.methods.parts.recipe.branches import alone
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register


@register("local", title="Local")
def local(
    rank: int = 8,
    alpha: float = 16.0,
    rounds: Annotated[int | None, POSITIVE] = None,
    blocks: Annotated[int, at_least(0)] = 0,
    pq_rate: Annotated[float, POSITIVE] = 2.5,
) -> Recipe:
    """Train an adapter on the client's own data and send nothing (up = down = 0).

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    rounds   how many times train.max_steps to train; default federation.rounds
    blocks   in so many blocks only the cores of PQ-LoRA, as FedMosaic's clients (its Table 29)
    pq_rate  their learning rate, as a multiple of train.lr

    The optimiser is kept from round to round, so this is rounds x train.max_steps ordinary steps.

    Source: Zou et al. 2026, Tables 2, 3 and 6; Seo et al. 2026, Table 29; docs/methods/local.md.
    """
    if not blocks:
        return Recipe(layout=lora(rank, alpha, slots=("personal",)), before=(alone(rounds),), use=Use(("personal",)))
    basis = Slot(BASIS, rank, alpha, head=False, form=Basis(blocks))
    personal = Slot("personal", rank, alpha, form=PQLora(blocks))
    training = alone(rounds, ((factor("P", "Q"), pq_rate),))
    return Recipe(layout=Layout((basis, personal)), before=(training,), use=Use(("personal",)))
