"""FlexLoRA (Bai et al. 2024): clients of different ranks average their updates, and get the best part of its rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from befit.adapters.keys import split
from befit.adapters.layout import lora
from befit.core.errors import ConfigError
from befit.core.values import State, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.ranked import Ranked, rank_problems
from befit.protocol.registry import register


@register("flexlora", title="FlexLoRA", paper="arXiv:2402.11505", year=2024)
def flexlora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: dict[str, int] | None = None,
    weights: Literal["examples", "uniform"] = "examples",
) -> Ranked:
    """Average the updates B A of clients of any rank; a client goes on from its best approximation of its own rank.

    rank     the largest rank
    alpha    scaling at every rank: delta = alpha / rank * B A
    ranks    rank by pattern of client ids, such as {"phone-*": 2}; null: everybody has the largest
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `D = sum_k p_k s B_k A_k = U S V^T`; client k starts from `B = U_r S_r / s`, `A = V_r^T`, r its rank.
    up = down = r(d_in + d_out) per module, r the largest rank. Deviation: the scale is the same at every rank, and
    arrays travel at the largest, zero beyond a client's own.

    Source: Bai et al. 2024, FlexLoRA; docs/methods/flexlora.md.
    """
    if problems := rank_problems(ranks or {}, rank):
        raise ConfigError(problems, "flexlora")
    return Ranked(lora(rank, alpha), BestOfSum(Merge(weights, space="delta", rank=rank)), ranks or {})


@dataclass(frozen=True)
class BestOfSum:
    """The weighted sum of the updates at the largest rank, with its singular values in B and orthonormal rows in A."""

    merge: Merge

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State:
        merged = self.merge(updates, context)
        for key in [key for key in merged if split(key)[2] == "A"]:
            other = f"{key.rpartition('/')[0]}/B"
            used = merged[other].any(0)  # ranks beyond those of the sum are zero in B and have a fresh start in A
            length = merged[key].norm(dim=1).where(used, 1.0)
            merged[key], merged[other] = merged[key] / length[:, None], merged[other] * length
        return merged
