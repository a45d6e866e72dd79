"""FedALT (Bian et al. 2025b): an individual adapter, one of the rest of the world, and a gate between them."""

from befit.adapters.keys import slot
from befit.adapters.layout import GATE, lora
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import LeaveOneOut
from befit.protocol.method import Needs, Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedalt", title="FedALT", paper="arXiv:2503.11880", year=2025)
def fedalt(rank: int = 8, alpha: float = 16.0) -> Recipe:
    """Train an individual adapter and a gate beside a frozen mean of everybody else's individual adapters.

    rank   rank of both adapters
    alpha  their scaling: delta = alpha / rank * B A

    `y = W x + s [alpha_R(x) B_R A_R x + alpha_I(x) B_I A_I x]`, `(alpha_R, alpha_I) = softmax(G x)` for every token
    and layer.
    The gate never leaves the client; the individual adapter goes up and is never overwritten; each client gets another
    mean (up = down = r(d_in + d_out) per module). The gate depends on the input, so the deployed model cannot be one
    PEFT adapter. Deviation: where there is a task head it is gated like the other modules, since the paper has none.

    Source: Bian et al. 2025b, Figure 1; jmbian/FedALT, server.py and peft/tuners/lora.py; docs/methods/fedalt.md.
    """
    gated = ("shared", "personal")
    return Recipe(
        layout=lora(rank, alpha, slots=gated, gated=gated),
        passes=(Pass(slot("personal", GATE), gated, mixer="gate"),),
        share=slot("personal"),
        route=LeaveOneOut(to="shared"),
        use=Use(gated, "gate"),
        needs=Needs(min_clients=2, individual_updates=True),
    )
