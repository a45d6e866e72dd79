"""Local training: every client alone, the baseline that federating has to beat."""

from befit.adapters.layout import lora
from befit.methods.parts.recipe.branches import alone
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register


@register("local", title="Local", paper="", year=0)
def local(rank: int = 8, alpha: float = 16.0, rounds: int | None = None) -> Recipe:
    """Train an adapter on the client's own data and send nothing (up = down = 0).

    rank    rank of the adapter
    alpha   its scaling: delta = alpha / rank * B A
    rounds  how many times train.max_steps to train; default federation.rounds

    The optimiser is kept from round to round, so this is rounds x train.max_steps ordinary steps.

    Source: Zou et al. 2026, baseline Local; docs/methods/local.md.
    """
    return Recipe(layout=lora(rank, alpha, slots=("personal",)), before=(alone(rounds),), use=Use(("personal",)))
