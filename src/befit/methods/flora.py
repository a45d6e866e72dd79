"""FLoRA (Wang et al. 2024a): clients' adapters are stacked, their sum moves into the backbone, and all start afresh."""

from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.folded import Folded
from befit.protocol.registry import register


@register("flora", title="FLoRA", paper="arXiv:2409.05976", year=2024)
def flora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: dict[str, int] | None = None,
    weights: ClientWeights = "examples",
) -> Folded:
    """Stack the adapters of clients of any rank, add their product to every client's backbone, and start afresh.

    rank     the largest rank
    alpha    scaling at every rank: delta = alpha / rank * B A
    ranks    rank by pattern of client ids, such as {"phone-*": 2}; null: everybody has the largest
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `W <- W + s [p_1 B_1 ... p_K B_K] [A_1; ...; A_K]`, which is `sum_k p_k s B_k A_k`; A of a round comes from a seed
    of that round, B = 0, the optimiser is new.
    up = r(d_in + d_out) per module, r the largest rank; down = sum_k r_k (d_in + d_out), of every round since the last;
    with one client up = down. Deviation: the scale is the same at every rank; arrays go up at the largest, zero beyond
    a client's own; a task head's mean change is folded in like the rest.

    Source: Wang et al. 2024a, Figures 2 and 3; ATP-1010/FederatedLLM, fed_utils/model_aggregation.py;
    docs/methods/flora.md.
    """
    return Folded(rank, alpha, Merge(weights, space="delta"), ranks=ranks or {})
