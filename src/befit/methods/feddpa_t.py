"""FedDPA-T as FedP2EFT uses it (Yang et al. 2024; Lee et al. 2025a): a personal adapter on top of the shared."""

from befit.adapters.keys import slot
from befit.adapters.layout import Layout, Slot
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("feddpa_t", title="FedDPA-T, summed", paper="arXiv:2502.04387", year=2025)
def feddpa_t(rank: int = 8, alpha: float = 8.0, weights: ClientWeights = "examples") -> Recipe:
    """Each round train the shared adapter and the task head, then, on top of both, a personal one that stays.

    rank     rank of both adapters
    alpha    their scaling: delta = alpha / rank * B A
    weights  how the server averages: "examples" or "uniform"

    `y = W x + s B_g A_g x + s B_l A_l x`, in training and at use; the personal adapter has no head and sees the shared
    one as this client has just trained it. A round takes twice the steps.
    up = down = r(d_in + d_out) per module, and the head. Deviation: the original FedDPA (`feddpa`) weighs the two by
    the input, and trains the personal one first.

    Source: Lee et al. 2025a, Table 3; SamsungLabs/fedp2eft, src/apps/clients/feddpa_seqcls_client.py;
    docs/methods/feddpa_t.md.
    """
    return Recipe(
        layout=Layout((Slot("shared", rank, alpha), Slot("personal", rank, alpha, head=False))),
        passes=(
            Pass(slot("shared"), ("shared",), name="shared"),
            Pass(slot("personal"), ("shared", "personal"), name="personal"),
        ),
        in_sequence=True,
        share=slot("shared"),
        merge=Merge(weights),
        use=Use(("shared", "personal")),
    )
