"""FedEx-LoRA (Singhal et al. 2025a): factors are averaged, and what their product misses moves into the backbone."""

from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.folded import Folded
from befit.protocol.registry import register


@register("fedex_lora", title="FedEx-LoRA", paper="arXiv:2410.09432", year=2025)
def fedex_lora(rank: int = 8, alpha: float = 16.0, weights: ClientWeights = "examples") -> Folded:
    """Average A and B, and add the rest of the mean update to every client's backbone.

    rank     rank of the adapter
    alpha    its scaling: delta = alpha / rank * B A
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `B = sum_k p_k B_k`, `A = sum_k p_k A_k`, `W <- W + s (sum_k p_k B_k A_k - B A)`.
    up = r(d_in + d_out) per module; down = the same, and K r (d_in + d_out) for the rest of every round since the last,
    K the replies: never up = down.

    Source: Singhal et al. 2025a, eqs. 5 to 9 and section 3.2; CERT-Lab/fedex-lora, fed_agg.py;
    docs/methods/fedex_lora.md.
    """
    return Folded(rank, alpha, Merge(weights, space="delta"), go_on="mean")
