"""FlexLoRA (Bai et al. 2024): clients of different ranks average their updates, and get the best part of its rank."""

from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.ranked import Ranked
from befit.protocol.registry import register


@register("flexlora", title="FlexLoRA", paper="arXiv:2402.11505", year=2024)
def flexlora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: dict[str, int] | None = None,
    weights: ClientWeights = "examples",
) -> Ranked:
    """Average the updates B A of clients of any rank; a client goes on from its best approximation of its own rank.

    rank     the largest rank
    alpha    scaling at every rank: delta = alpha / rank * B A
    ranks    rank by pattern of client ids, such as {"phone-*": 2}; null: everybody has the largest
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `D = sum_k p_k s B_k A_k = U S V^T`; client k starts from `B = U_r S_r / s`, `A = V_r^T`, r its rank.
    up = down = r(d_in + d_out) per module, r the largest rank. Deviation: the scale is the same at every rank, and
    arrays travel at the largest, zero beyond a client's own.

    Source: Bai et al. 2024, Figure 2; docs/methods/flexlora.md.
    """
    return Ranked(lora(rank, alpha), Merge(weights, space="delta", rank=rank, split="B"), ranks or {})
