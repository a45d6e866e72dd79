"""FedMomentum (Yan et al. 2026): the best part of the mean update goes on as an adapter, the rest into the backbone."""

from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.folded import Folded
from befit.protocol.registry import register


@register("fedmomentum", title="FedMomentum", paper="arXiv:2603.08014", year=2026)
def fedmomentum(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Folded:
    """Go on from the leading singular directions of the mean update, and fold the others into every client's backbone.

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `D = sum_k p_k s B_k A_k = U S V^T`, `B = U_r (S_r / s)^1/2`, `A = (S_r / s)^1/2 V_r^T`, `W <- W + D - s B A`.
    up = r(d_in + d_out) per module; down = the same, and K r (d_in + d_out) for the rest of every round since the last,
    K the replies: never up = down. Deviation: the decomposition is exact, and all of the rest is folded in.

    Source: Yan et al. 2026, Figure 3; boyi-liu/FedLLM-Factory, alg/fedmomentum.py; docs/methods/fedmomentum.md.
    """
    return Folded(rank, alpha, Merge(weights, space="delta"), go_on="best")
