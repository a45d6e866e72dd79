"""ReLoRA in a federation: every round's merged update moves into the backbone, and the adapters start afresh."""

from typing import Annotated

from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE
from befit.merge.merge import Merge
from befit.methods.parts.recipe.folded import Folded
from befit.protocol.registry import register


@register("relora", title="ReLoRA merging", paper="arXiv:2307.05695", year=2023)
def relora(
    rank: int = 8,
    alpha: float = 16.0,
    merge: Merge = Merge(),  # noqa: B008 frozen
    relora_rank: Annotated[int | None, POSITIVE] = None,
) -> Folded:
    """Fold the whole merged update into every client's backbone after each round, and draw fresh adapters.

    rank         rank of the adapters
    alpha        their scaling: delta = alpha / rank * B A
    merge        space, rule and finish of the merge, see `Merge`
    relora_rank  largest rank of what one round folds in; null keeps all of it, up to rank times the clients

    `W <- W + dW_G`, never cut to the rank of an adapter in the spaces knots and delta; A of round t comes from a seed
    of that round, B = 0, the optimiser is new.
    up = down = r(d_in + d_out) per module in the space factors; in the others down has the rank of the round's update
    in place of r, and a client that missed rounds gets all that it missed. The backbone itself is not written to:
    a frozen dense slot holds the sum, in float32 and in the order of the rounds. Deployed is the backbone that the
    client trained on last, with its adapter.
    Deviation: no pruning of the optimiser and no second warm-up, as the adapters' optimiser is new in every round; a
    task head's mean change is folded in like the rest.

    Source: Lialin et al. 2023, Algorithm 1; Piorczynski et al. 2025, Table 1; docs/methods/relora.md.
    """
    problems = list[str]()
    if merge.space == "factors" and relora_rank is not None:
        problems.append("relora_rank: the space factors gives an update of the adapter's rank; nothing to cut")
    if merge.rank is not None:
        problems.append("merge.rank: nothing is cut to an adapter; relora_rank limits what is folded in")
    if merge.split != "even":
        problems.append("merge.split: nothing becomes an adapter again, whose factors share the singular values")
    if merge.tolerance is not None and merge.space == "delta" and merge.rule != "iso-c":
        problems.append("merge.tolerance: the space delta decomposes an update to cut it to an adapter; nothing is cut")
    if problems:
        raise ConfigError(problems, "relora")
    return Folded(rank, alpha, merge, limit=relora_rank, own=True)
