"""From aggregation to guidance: what the server merges (2025), and how clients use it."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.adapters.lowrank import RankRule
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE, between
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import Broadcast
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.blend import Blend
from befit.train.passes import Pass
from befit.train.terms import L2, Distil, ProductDistance, Term

_LOG = logging.getLogger(__name__)


@register("guidance", title="Server merging x client guidance", paper="openreview.net/forum?id=wdYl0agN49", year=2025)
def guidance(
    rank: int = 8,
    alpha: float = 16.0,
    merge: Merge = Merge(),  # noqa: B008 frozen
    guide: Literal["hard", "parametric", "function", "own"] = "hard",
    beta: Annotated[float, between(0, 1)] = 0.1,
    similarity: Literal["fixed", "cosine", "sar", "min"] = "fixed",
    start: Literal["own", "global"] = "own",
    penalty: Literal["factors", "product"] = "factors",
    align: Literal["none", "procrustes"] = "none",
    temperature: Annotated[float, POSITIVE] = 2.0,
    kd_direction: Literal["local_global", "global_local", "js"] = "local_global",
    kd_divide_by_vocab: bool = False,
    cosine_on: Literal["factors", "product"] = "factors",
    negative: Literal["clamp", "shift"] = "clamp",
    rank_rule: RankRule = "energy",
    keep_optimiser: bool = False,
) -> Recipe:
    """Merge all clients' adapters by any rule in any space; each client keeps its own adapter and is guided by that.

    rank                rank of the adapters
    alpha               their scaling: delta = alpha / rank * B A
    merge               space, rule and finish of the merge, see `Merge`
    guide               "hard" starts each round from the merged adapter; "parametric" pulls the weights to it;
                        "function" distils it; "own" ignores it (the control: own start, no guidance)
    beta                strength of guidance: the loss is (1 - beta) task + beta guidance; 0 in the first round
    similarity          what beta is multiplied by: "fixed" 1, "cosine" or "sar" to the merged adapter, or their "min"
    start               parametric and function: a round starts from the client's "own" adapter or the "global" one
    penalty             parametric: distance of "factors" (the paper) or of their "product"
    align               parametric, factors: "procrustes" turns the merged factors towards the client's own first
    temperature         function: T of the softmax
    kd_direction        function: KL(own || merged) is "local_global" (the paper), "global_local" the usual one, or "js"
    kd_divide_by_vocab  function: divide by the number of classes, as the paper prints; the term is then tiny
    cosine_on           cosine of "factors" (the paper) or of their "product", which no change of basis alters
    negative            a negative cosine counts 0 ("clamp") or is shifted to (1 + c) / 2 ("shift")
    rank_rule           directions that sar compares: 95 % of "energy", of its root ("norm"), all but 5 % "error" (its
                        paper), or the "reference" script
    keep_optimiser      keep the optimiser's averages from round to round; not with a start from the merged adapter

    up = down = r(d_in + d_out) per module. What is deployed is the client's own adapter after its local training.
    Folding the merged update into the backbone is the method relora. Deviation: positions of the distillation are those
    of the loss; a task head is averaged, penalised and copied with the adapter.

    Source: Piorczynski et al. 2025, Tables 1 to 3; docs/methods/guidance.md.
    """
    copies = guide == "hard" or (guide != "own" and start == "global")
    if problems := _problems(guide, similarity, start, penalty, align, keep_optimiser and copies):
        raise ConfigError(problems, "guidance")
    if merge.rank not in (None, rank):
        raise ConfigError(
            [f"merge.rank: what is merged is sent at the adapter's rank, {rank}, got {merge.rank}"], "guidance"
        )
    if guide == "parametric" and merge.space != "factors" and (penalty, align) == ("factors", "none"):
        _LOG.warning(
            "merge.space %s gives factors in a basis of its own, so their distance from the client's says "
            "little; set align: procrustes or penalty: product",
            merge.space,
        )
    terms: dict[str, tuple[Term, ...]] = {
        "hard": (),
        "own": (),
        "parametric": (
            L2("personal", to="shared", weight=1.0, align=align)
            if penalty == "factors"
            else ProductDistance("personal", to="shared", weight=1.0),
        ),
        "function": (Distil("shared", temperature, kd_direction, kd_divide_by_vocab),),
    }
    blend = Blend(beta, similarity, cosine_on=cosine_on, negative=negative, rank_rule=rank_rule)
    return Recipe(
        layout=lora(rank, alpha, slots=("shared", "personal")),
        passes=(
            Pass(
                slot("personal"),
                ("personal",),
                terms[guide],
                name="personal",
                keep_optimiser=keep_optimiser,
                blend=blend if terms[guide] else None,
            ),
        ),
        share=slot("personal"),
        merge=merge,
        route=Broadcast(to="shared"),
        start=("shared", "personal") if copies else None,
        use=Use(("personal",)),
    )


def _problems(guide: str, similarity: str, start: str, penalty: str, align: str, kept: bool) -> list[str]:
    """Combinations that mean nothing, each with the reason."""
    problems = []
    if guide in ("hard", "own"):
        if similarity != "fixed":
            problems.append(f"similarity: {similarity!r} adjusts the strength of guidance; guide {guide!r} has none")
        if start != "own":
            problems.append(f"start: only guide parametric and function choose where a round starts, not {guide!r}")
    if guide != "parametric" and (penalty != "factors" or align != "none"):
        problems.append(f"penalty: penalty and align belong to guide parametric, not to {guide!r}")
    if penalty == "product" and align != "none":
        problems.append("align: the distance of products does not depend on the factors; nothing to align")
    if kept:
        problems.append(
            "keep_optimiser: the averages would be of other coordinates after a start from the merged adapter"
        )
    return problems
