"""A federated and a local adapter, put together by one weight: given, or picked on the client's validation examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from befit.adapters.keys import slot
from befit.adapters.layout import Slot
from befit.core.errors import ConfigError
from befit.core.values import Scalar, State, Tick
from befit.merge.merge import Merge
from befit.merge.pair import merge_pair
from befit.methods.parts.recipe.branches import WEIGHT, two_branches
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.registry import register
from befit.protocol.site import Site


@register("interpolation", title="Interpolation", year=2026)
def interpolation(
    rank: int = 8,
    alpha: float = 16.0,
    rounds_local: int | None = None,
    rounds_fedit: int | None = None,
    weights: Literal["examples", "uniform"] = "examples",
    w: float | None = 0.5,
    steps: int = 10,
) -> Recipe:
    """Train FedIT and a local adapter from one initial adapter, then interpolate the two at each client by one weight.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    rounds_local  how many times train.max_steps to train alone; default federation.rounds
    rounds_fedit  rounds of FedIT; default federation.rounds
    weights       how the server averages: "examples" or "uniform"
    w             weight of the federated adapter, from 0 to 1; null: picked on validation examples
    steps         w is picked among 0, 1 / steps, 2 / steps, ..., 1

    `A = w A_f + (1 - w) A_l`, B and a task head likewise: what every rule that computes such a weight has to beat. Of
    equally good weights the one nearest to 0.5 is picked, and of two such the smaller one. up = down = r(d_in + d_out)
    per module and FedIT round, and one more download for the merge.

    Source: Zou et al. 2026, eqs. 3 and 4; Zou et al. 2026, Figure 3c; docs/methods/interpolation.md.
    """
    problems = [f"w: must be from 0 to 1, or null, got {w}"] * (w is not None and not 0 <= w <= 1)
    if problems := [*problems, *[f"steps: must be at least 1, got {steps}"] * (steps < 1)]:
        raise ConfigError(problems, "interpolation")
    return two_branches(
        Interpolate(w, steps),
        Slot("merged", rank, alpha),
        rank=rank,
        alpha=alpha,
        rounds_local=rounds_local,
        rounds_fedit=rounds_fedit,
        weights=Merge(weights),
        splits=("val",) if w is None else (),
        diagnostics=(WEIGHT,),
    )


@dataclass(frozen=True)
class Interpolate:
    """The rule; see `interpolation` for the fields."""

    w: float | None
    steps: int

    def __call__(self, site: Site, at: Tick) -> tuple[State, dict[str, Scalar]]:
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))
        w = self.w if self.w is not None else self._picked(site, fed, local)
        site.report.update({"w": w})
        return merge_pair(fed, local, {"": w}, "factors"), {"w": w}

    def _picked(self, site: Site, fed: State, local: State) -> float:
        scores: dict[float, float] = {}
        for step in range(self.steps + 1):
            w = step / self.steps
            with site.model.using(merge_pair(fed, local, {"": w}, "factors"), "merged"):
                scores[w] = site.task.headline(
                    site.model.backbone, site.examples("val"), site.budget.batch_size, site.model.device
                )
        return max(scores, key=lambda w: (scores[w], -abs(w - 0.5), -w))
