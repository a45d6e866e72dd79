"""Fisher merging (Matena and Raffel 2022): a federated and a local adapter, every entry by its information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from befit.adapters.forms import DENSE, LORA
from befit.adapters.keys import join, slot, split
from befit.adapters.layout import Slot
from befit.adapters.lowrank import truncate
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights, Payload, Scalar, State, Tick
from befit.merge.merge import Merge
from befit.merge.pair import merge_pair
from befit.methods.parts.recipe.branches import RANGE, two_branches
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.registry import register
from befit.protocol.site import Site
from befit.train.paired_fisher import Correlation, Damping, Statistics, estimate


@register("fisher_merging", title="Fisher merging", paper="arXiv:2111.09832", year=2022)
def fisher_merging(
    rank: int = 8,
    alpha: float = 16.0,
    rounds_local: Annotated[int | None, POSITIVE] = None,
    rounds_fedit: Annotated[int | None, POSITIVE] = None,
    weights: ClientWeights = "examples",
    space: Literal["dense", "dense-truncated", "lora"] = "dense",
    statistics: Statistics = Statistics(),  # noqa: B008 frozen
    damping: Damping = Damping(),  # noqa: B008 frozen
) -> Recipe:
    """Train FedIT and a local adapter from one start, then average them entry by entry, by their Fisher information.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    rounds_local  how many times train.max_steps to train alone; default federation.rounds
    rounds_fedit  rounds of FedIT; default federation.rounds
    weights       how the server averages: "examples" or "uniform"
    space         entries of the whole updates ("dense", both papers), of those, cut to rank r, or of A and B ("lora")
    statistics    examples and labels that the information is of: samples, split, fisher, token_reduction
    damping       what keeps weights apart from noise, eps: kind, delta, scope, drop_dead

    `W_m = ((F_f + eps) W_f + (F_l + eps) W_l) / (F_f + F_l + 2 eps)`; entries without information get the mean.
    up = down = r(d_in + d_out) per module and FedIT round, and one more download for the merge. Deviation: a task head
    has no entry of its own in the information; its weight is that of the whole adapter, `tr(1/F_l) / (tr(1/F_f) +
    tr(1/F_l))`.

    Source: Matena and Raffel 2022, Fisher merging; Zou et al. 2026, section 4.2 and appendix H;
    docs/methods/fisher_merging.md.
    """
    return two_branches(
        FisherMerge(space, statistics, damping),
        Slot("merged", rank, alpha, form=DENSE if space == "dense" else LORA),
        rank=rank,
        alpha=alpha,
        rounds_local=rounds_local,
        rounds_fedit=rounds_fedit,
        weights=Merge(weights),
        splits=(statistics.split,),
        diagnostics=(RANGE,),
    )


@dataclass(frozen=True)
class FisherMerge:
    """The rule; see `fisher_merging` for the fields."""

    space: Literal["dense", "dense-truncated", "lora"]
    statistics: Statistics
    damping: Damping

    def __call__(self, site: Site, at: Tick, client: Payload) -> tuple[State, dict[str, Scalar]]:
        space = "factors" if self.space == "lora" else "product"
        moments = estimate(site, at, "shared", "personal", self.statistics, space)
        variances = moments.variances(self.damping, Correlation(estimate=False))  # 1 / (F + eps)
        a, b, _ = variances.traces()
        w = b / (a + b) if a + b > 0 else 0.5
        by_entry = variances.coordinate_weights()
        entries = torch.cat(list(by_entry.values()))
        site.report.update(
            {
                "w": w,
                "w_min": float(entries.min()),
                "w_max": float(entries.max()),
                "samples": float(moments.count),
                **variances.counts,
            }
        )
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))
        if self.space == "lora":
            return merge_pair(fed, local, {"": w, **by_entry}, "factors"), {"w": w}
        heads = {key: value for key, value in fed.items() if split(key)[2] not in ("A", "B")}
        merged = merge_pair(heads, local, {"": w}, "factors")
        scale, rank = site.model.layout.slot("shared").scale, site.model.layout.slot("shared").rank
        for name in site.model.adapted("shared"):
            fed_delta, local_delta = (
                scale * state[join(branch, name, "B")] @ state[join(branch, name, "A")]
                for branch, state in (("shared", fed), ("personal", local))
            )
            whole = torch.lerp(local_delta, fed_delta, by_entry[f"{name}/delta"].view_as(fed_delta).to(fed_delta.dtype))
            if self.space == "dense":
                merged[join("merged", name, "weight")] = whole
            else:
                pair = truncate((whole / scale, torch.eye(whole.shape[1])), rank)
                merged[join("merged", name, "B")], merged[join("merged", name, "A")] = pair
        return merged, {"w": w}
