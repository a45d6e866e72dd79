"""A federated and a local adapter, put together by one weight: given, or from what held-out examples say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from befit.adapters.keys import slot
from befit.adapters.layout import Slot
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights, Payload, Scalar, State, Tick
from befit.merge.merge import Merge
from befit.merge.pair import merge_pair
from befit.methods.parts.recipe.branches import WEIGHT, on_grid, posterior_mean, two_branches
from befit.methods.parts.recipe.cross_fit import CrossFitted, cross_fitted_mean
from befit.protocol.method import Method
from befit.protocol.registry import register
from befit.protocol.site import Site

Weight = float | Literal["best", "posterior", "cross-fitted"]


@register("interpolation", title="Interpolation", year=2026)
def interpolation(
    rank: int = 8,
    alpha: float = 16.0,
    rounds_local: Annotated[int | None, POSITIVE] = None,
    rounds_fedit: Annotated[int | None, POSITIVE] = None,
    weights: ClientWeights = "examples",
    w: Weight = 0.5,
    steps: Annotated[int, POSITIVE] = 10,
) -> Method:
    """Train FedIT and a local adapter from one initial adapter, then interpolate the two at each client by one weight.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    rounds_local  how many times train.max_steps to train alone; default federation.rounds
    rounds_fedit  rounds of FedIT; default federation.rounds
    weights       how the server averages: "examples" or "uniform"
    w             weight of the federated adapter, from 0 to 1; of those on a grid, "best": the one with the best metric
                  on the client's validation examples, or "posterior": their mean by the likelihood of these examples;
                  "cross-fitted": the same mean by the training examples, each judged by adapters that have not seen it
    steps         the grid is 0, 1 / steps, 2 / steps, ..., 1

    `A = w A_f + (1 - w) A_l`, B and a task head likewise: what every rule that computes such a weight has to beat. Of
    equally good weights "best" takes the one nearest to 0.5, and of two such the smaller one. "posterior" is
    `sum w exp(-L(w)) / sum exp(-L(w))`, with the loss L summed over the examples. up = down = r(d_in + d_out) per
    module and FedIT round, and one more download for the merge; "cross-fitted" takes four times that.

    Source: Zou et al. 2026, eqs. 3 and 4; Zou et al. 2026, Figure 3c; docs/methods/interpolation.md.
    """
    if isinstance(w, float | int) and not 0 <= w <= 1:
        raise ConfigError([f"w: must be from 0 to 1, or best, posterior or cross-fitted, got {w}"], "interpolation")
    recipe = two_branches(
        Interpolate(w, steps),
        Slot("merged", rank, alpha),
        rank=rank,
        alpha=alpha,
        rounds_local=rounds_local,
        rounds_fedit=rounds_fedit,
        weights=Merge(weights),
        splits=("val",) if w in ("best", "posterior") else (),
        diagnostics=(WEIGHT,),
    )
    return CrossFitted(recipe, steps) if w == "cross-fitted" else recipe


@dataclass(frozen=True)
class Interpolate:
    """The rule; see `interpolation` for the fields."""

    w: Weight
    steps: int

    def __call__(self, site: Site, at: Tick, client: Payload) -> tuple[State, dict[str, Scalar]]:
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))

        def merged(w: float) -> State:
            return merge_pair(fed, local, {"": w}, "factors")

        if self.w == "best":
            scores = on_grid(site, merged, self.steps, site.task.headline)
            w = max(scores, key=lambda w: (scores[w], -abs(w - 0.5), -w))
        elif self.w == "posterior":
            w = posterior_mean(site, merged, self.steps)
        else:
            w = cross_fitted_mean(site, client) if self.w == "cross-fitted" else self.w
        site.report.update({"w": w})
        return merged(w), {"w": w}
