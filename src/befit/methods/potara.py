"""Potara (Zou et al. 2026): a federated and a local adapter, merged by a weight in closed form.

The equations, in the order of docs/methods/potara.md, are in `befit.train.paired_fisher` (statistics) and here
(`closed_form_weight`, the merge). `f` is the federated adapter, `l` the local one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from befit.adapters.keys import slot
from befit.adapters.layout import Slot
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights, Payload, Scalar, State, Tick
from befit.merge.merge import Merge
from befit.merge.pair import comparison, merge_pair
from befit.methods.parts.recipe.branches import (
    GUARD,
    RANGE,
    WEIGHT,
    MergeBranches,
    keep_best,
    posterior_mean,
    two_branches,
)
from befit.methods.parts.recipe.cross_fit import CrossFitted, cross_fitted_mean
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Method
from befit.protocol.registry import register
from befit.protocol.site import Site
from befit.train.paired_fisher import Correlation, Damping, PairedFisher, Statistics, Variances, estimate, group_traces

_LOG = logging.getLogger(__name__)

Granularity = Literal["client", "factor", "layer", "tensor", "coordinate"]
WeightRule = Literal["closed-form", "posterior", "cross-fitted"]


@register("potara", title="Potara", paper="arXiv:2602.18658", year=2026)
def potara(
    rank: int = 8,
    alpha: float = 16.0,
    rounds_local: Annotated[int | None, POSITIVE] = None,
    rounds_fedit: Annotated[int | None, POSITIVE] = None,
    weights: ClientWeights = "examples",
    statistics: Statistics = Statistics(),  # noqa: B008 frozen
    damping: Damping = Damping(),  # noqa: B008 frozen
    correlation: Correlation = Correlation(),  # noqa: B008 frozen
    granularity: Granularity = "client",
    estimate_space: Literal["factors", "product"] = "factors",
    merge_space: Literal["factors", "product", "product-truncated"] = "factors",
    guard: Literal["none", "validation"] = "none",
    weight: WeightRule = "closed-form",
) -> Method:
    """Train FedIT and a local adapter from one initial adapter, then merge the two at each client.

    rank             rank of both adapters
    alpha            their scaling: delta = alpha / rank * B A
    rounds_local     how many times train.max_steps to train alone; default federation.rounds
    rounds_fedit     rounds of FedIT; default federation.rounds
    weights          how the server averages: "examples" or "uniform"
    statistics       examples and labels that the gradients are of: samples, split, fisher, token_reduction
    damping          what keeps 1/F finite: kind, delta, scope, drop_dead
    correlation      how that of the two models' gradients is estimated: estimate, centred, shrink
    granularity      one weight per client (the paper), factor, layer, tensor or coordinate
    estimate_space   Fisher information of A and B (the paper) or of their product
    merge_space      interpolate A and B (the paper), or the product, exact at rank 2r or truncated to rank r
    guard            "validation" deploys the best of merged, federated and local by the client's validation examples
    weight           "posterior" takes the mean of eleven weights by the likelihood of the client's validation examples
                     in place of the closed form, without any statistics; "cross-fitted" the same mean by its training
                     examples, each judged by adapters that have not seen it

    up = down = r(d_in + d_out) per module and FedIT round, and one more download for the merge; "cross-fitted" takes
    four times that. The local branch and the merge send nothing. A smaller trace bound is not a smaller loss:
    compare with the weight picked on validation.

    Source: Zou et al. 2026, eqs. 3, 4, 13, 17 to 20 and 53 to 59; Zou et al. 2026, appendix B; docs/methods/potara.md.
    """
    if granularity not in ("client", "layer") and (merge_space != "factors" or estimate_space != "factors"):
        problem = (
            f"granularity: {granularity!r} gives A and B of one module different weights, which a product does not "
            "have; use granularity client or layer, or estimate_space and merge_space factors"
        )
        raise ConfigError([problem], "potara")
    if weight != "closed-form" and granularity != "client":
        raise ConfigError(
            [f"weight: {weight} is one weight for each client, and granularity is {granularity}"], "potara"
        )
    held_out = guard == "validation" or weight == "posterior"
    merged_rank = 2 * rank if merge_space == "product" else rank
    recipe = two_branches(
        PotaraMerge(statistics, damping, correlation, granularity, estimate_space, merge_space, guard, weight),
        Slot("merged", merged_rank, alpha * merged_rank / rank),  # the same alpha / rank as its parents
        rank=rank,
        alpha=alpha,
        rounds_local=rounds_local,
        rounds_fedit=rounds_fedit,
        weights=Merge(weights),
        splits=(statistics.split if weight == "closed-form" else "train", *(["val"] if held_out else [])),
        diagnostics=(WEIGHT if granularity == "client" else RANGE, *([GUARD] if guard == "validation" else [])),
    )
    return CrossFitted(recipe, space=merge_space) if weight == "cross-fitted" else recipe


def merge_rule(method: Method) -> PotaraMerge:
    """How a method that `potara` made merges. Raises TypeError for any other method."""
    recipe = method.method if isinstance(method, CrossFitted) else method
    stages = recipe.then if isinstance(recipe, Recipe) else ()
    rules = [stage.rule for stage in stages if isinstance(stage, MergeBranches)]
    if len(rules) == 1 and isinstance(rules[0], PotaraMerge):
        return rules[0]
    raise TypeError("the method does not merge as Potara does")


@dataclass(frozen=True)
class PotaraMerge:
    """The rule that estimates, weighs, merges and guards; see `potara` for the fields."""

    statistics: Statistics
    damping: Damping
    correlation: Correlation
    granularity: Granularity
    estimate_space: Literal["factors", "product"]
    merge_space: Literal["factors", "product", "product-truncated"]
    guard: Literal["none", "validation"] = "none"
    weight: WeightRule = "closed-form"

    def moments(self, site: Site, at: Tick) -> PairedFisher:
        """The per-sample statistics of both branches, as this rule takes them."""
        return estimate(site, at, "shared", "personal", self.statistics, self.estimate_space)

    def __call__(self, site: Site, at: Tick, client: Payload) -> tuple[State, dict[str, Scalar]]:
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))

        def at_weight(w: float) -> State:
            return merge_pair(fed, local, {"": w}, self.merge_space)

        if self.weight != "closed-form":
            judged = self.weight == "cross-fitted"
            numbers = {"w": cross_fitted_mean(site, client) if judged else posterior_mean(site, at_weight, 10)}
            merged = at_weight(numbers["w"])
        else:
            weights, numbers = weigh(self.moments(site, at), self)
            merged = merge_pair(fed, local, weights, self.merge_space)
        site.report.update(numbers)
        compared = comparison(fed, local, numbers["w"])
        if self.granularity != "client":
            del compared["product_gap"]  # it is of one weight for everything
        site.report.update(compared)
        _warn(site.info.id, numbers, compared)
        if self.guard == "validation":
            merged = keep_best(
                site,
                {"merged": merged, "federated": at_weight(1.0), "local": at_weight(0.0)},
                "val",
            )
        return merged, {"w": numbers["w"]}


def _warn(client: str, numbers: Mapping[str, float], compared: Mapping[str, float]) -> None:
    """Say when the weight rests on the damping, or on a gauge that the parents do not share."""
    if numbers.get("damped_share", 0.0) > 0.5:
        _LOG.warning(
            "client %s: its data say little about its merging weight, and the %.2f that was used is mostly set by "
            "damping (%.0f %% of the entries have less information than that adds)",
            client,
            numbers["w"],
            100 * numbers["damped_share"],
        )
    # B starts at zero, so its length says how long each parent trained; a change of gauge shows in A.
    if compared["norm_ratio_A_min"] < 0.5 or compared["norm_ratio_A_max"] > 2:
        _LOG.warning(
            "client %s: the federated and the local A differ more than twofold in length at some module "
            "(norm_ratio_A_min and _max); in factor space the weight depends on that, so compare with "
            "estimate_space: product",
            client,
        )


def closed_form_weight(a: float, b: float, c: float) -> tuple[float, bool]:
    """Weight of the federated adapter, `w = (b - c) / (a + b - 2c)` (eq. 17-18), and whether it is degenerate.

    a, b  traces of the two covariances; c  trace of their cross-covariance, at most min(a, b)
    ->    the minimiser of w^2 a + (1-w)^2 b + 2 w (1-w) c; 0.5 where that is flat

    Raises FloatingPointError for a trace that is not finite.

    >>> closed_form_weight(1.0, 3.0, 0.0)
    (0.75, False)
    """
    if not all(map(torch.isfinite, torch.tensor([a, b, c], dtype=torch.float64))):
        raise FloatingPointError(f"the traces of the adapters' covariances are not finite: a={a}, b={b}, c={c}")
    curvature = a + b - 2 * c
    if curvature <= 1e-12 * (a + b):
        return 0.5, True
    return min(1.0, max(0.0, (b - c) / curvature)), False


def merged_trace(a: float, b: float, c: float, w: float) -> float:
    """`f(w) = w^2 a + (1-w)^2 b + 2 w (1-w) c`: the trace of the merged adapter's covariance (eq. 13, 40)."""
    return w * w * a + (1 - w) ** 2 * b + 2 * w * (1 - w) * c


def coordinate_trace(variances: Variances) -> float:
    """`sum_j (v_f v_l - c^2) / (v_f + v_l - 2c)`, the least trace when every coordinate has its own weight.

    Where that is flat, both ends are alike: `v_f`. Zou et al. 2026, eqs. 17 and 18, coordinate by coordinate.
    """
    v_f, v_l, c = variances.fed, variances.local, variances.cross
    curvature = v_f + v_l - 2 * c
    flat = curvature <= 1e-12 * (v_f + v_l)
    # c may be min(v_f, v_l): written so that no two nearly equal products are subtracted.
    least = v_f - (v_f - c).square() / curvature.where(~flat, curvature.new_ones(()))
    return float(v_f.where(flat, least).sum())


def weigh(moments: PairedFisher, stage: PotaraMerge) -> tuple[dict[str, Tensor | float], dict[str, float]]:
    """Weights by key without its slot (a number, or a tensor for single coordinates), and what goes into the log.

    Key "" holds the client's own weight, for arrays that the statistics leave out, such as a task head.
    """
    rho = moments.rho(stage.correlation)
    variances = moments.variances(stage.damping, rho=rho)
    a, b, c = variances.traces()
    w, degenerate = closed_form_weight(a, b, c)
    weights: dict[str, Tensor | float] = {"": w}
    total = 0.0
    if stage.granularity == "coordinate":
        weights |= variances.coordinate_weights()
        total = coordinate_trace(variances)
    elif stage.granularity != "client":
        for keys, (ga, gb, gc) in group_traces(variances, stage.granularity).items():
            group_weight, _ = closed_form_weight(ga, gb, gc)
            total += merged_trace(ga, gb, gc, group_weight)
            weights |= dict.fromkeys(keys, group_weight)
    numbers = {
        "w": w,
        "trace_fed": a,
        "trace_local": b,
        "trace_shared": c,
        "trace_merged": merged_trace(a, b, c, w),
        "degenerate": float(degenerate),
        "samples": float(moments.count),
        **variances.counts,
    }
    if stage.granularity != "client":
        numbers["trace_merged_groups"] = total
    if used := [torch.as_tensor(value).flatten().double() for key, value in weights.items() if key]:
        numbers |= {"w_min": float(torch.cat(used).min()), "w_max": float(torch.cat(used).max())}
    if stage.damping.kind == "relative":
        for delta in (1e-5, 1e-4, 1e-3):  # how much the weight hangs on the damping
            name, damping = f"w_at_delta_{delta:.0e}", stage.damping.with_delta(delta)
            if delta == stage.damping.size:
                numbers[name] = w
                continue
            numbers[name] = closed_form_weight(*moments.variances(damping, rho=rho).traces())[0]
    return weights, numbers
