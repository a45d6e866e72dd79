"""A federated and a local adapter from one start, and a personal stage that makes one of the two.

The federated branch is in slot `shared`, the local one in `personal`; the result goes to `merged`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from befit.adapters.keys import NOTHING, Selector, slot
from befit.adapters.layout import Layout, Slot
from befit.core.errors import IncompatibleAdapters
from befit.core.values import ClientInfo, Payload, Scalar, State, Tick
from befit.merge.merge import Merge
from befit.methods.parts.recipe.personal import LocalTraining
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Diagnostic, Needs, Use
from befit.protocol.site import Site
from befit.protocol.stage import Personal, Stage
from befit.train.passes import Pass

if TYPE_CHECKING:
    import torch
    from torch import nn

    from befit.tasks.base import Examples

WEIGHT = Diagnostic(
    "share",
    ("w",),
    "w is the weight of the federated adapter in a client's merged model: 1 is the federated adapter alone, 0 the "
    "client's own alone.",
    "Mixing weights",
)
RANGE = replace(
    WEIGHT,
    keys=("w_min", "w_max"),
    text=f"{WEIGHT.text} Every group of arrays has its own weight here: shown is the range over the groups, from w_min "
    "to w_max. The one w among the diagnostics is used for the task head only.",
)
GUARD = Diagnostic(
    "choice",
    ("guard_kept_",),
    "A guard compared the {choices} adapter of each client on its own validation examples, and kept {kept}.",
)


class BranchMerge(Protocol):
    """How two branches become one."""

    def __call__(self, site: Site, at: Tick, client: Payload) -> tuple[State, dict[str, Scalar]]:
        """The arrays of slot `merged`, and plain numbers that the client keeps beside them.

        The model holds both branches, and `client` is what the client remembers. Diagnostics go to `site.report`.
        """
        ...


def alone(rounds: int | None, rates: tuple[tuple[Selector, float], ...] = ()) -> LocalTraining:
    """Training of the personal slot without any server; `rates` as in `Pass`."""
    training = Pass(slot("personal"), ("personal",), name="personal", keep_optimiser=True, rates=rates)
    return LocalTraining((training,), rounds=rounds)


def two_branches(
    rule: BranchMerge,
    merged: Slot,
    *,
    rank: int,
    alpha: float,
    rounds_local: int | None,
    rounds_fedit: int | None,
    weights: Merge,
    splits: tuple[str, ...],
    diagnostics: tuple[Diagnostic, ...],
) -> Recipe:
    """Train alone, then FedIT, both from one initial adapter, and merge the two at each client by `rule`."""
    return Recipe(
        layout=Layout((Slot("shared", rank, alpha), Slot("personal", rank, alpha), merged)),
        before=(alone(rounds_local),),
        passes=(Pass(slot("shared"), ("shared",)),),
        share=slot("shared"),
        merge=weights,
        then=(MergeBranches(rule),),
        use=Use(("merged",)),
        rounds=rounds_fedit,
        needs=Needs(splits=tuple(dict.fromkeys(("train", *splits)))),
        diagnostics=diagnostics,
    )


@dataclass(frozen=True)
class MergeBranches:
    """The personal stage: receive the federated branch, check that both have one start, merge by `rule`."""

    rule: BranchMerge
    name: str = "merge"
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    def stage(self, recipe: Recipe) -> Stage:
        down = replace(recipe.download, numbers=("initial",))
        reads = "how branches are merged"
        return Stage(self.name, _Merging(self.rule, recipe), None, down, self.rounds, trains=NOTHING, reads=reads)


@dataclass(frozen=True)
class _Merging(Personal):
    rule: BranchMerge
    recipe: Recipe

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client) | Payload({}, {"initial": server.scalars["initial"]})

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        check_same_start(client, received, site.info.id)
        self.recipe.restore(client, received, site)
        merged, numbers = self.rule(site, at, client)
        return client | Payload(merged, numbers), Payload()


def keep_best(site: Site, candidates: Mapping[str, State], split: str) -> State:
    """The candidate for slot `merged` with the best headline metric on a split of the client's own; the earlier wins a
    tie. Reports for each `guard_score_<candidate>`, its metric, and `guard_kept_<candidate>`, 1 for the one kept.
    """
    scores = {}
    for name, state in candidates.items():
        with site.model.using(state, "merged"):
            metrics = site.task.evaluate(
                site.model.backbone, site.examples(split), site.budget.batch_size, site.model.device
            )
        scores[name] = metrics[site.task.metric]
    best = max(scores, key=lambda name: scores[name])
    for name, score in scores.items():
        site.report |= {f"guard_score_{name}": score, f"guard_kept_{name}": float(name == best)}
    return candidates[best]


def on_grid(
    site: Site,
    merged: Callable[[float], State],
    steps: int,
    measure: Callable[[nn.Module, Examples, int, torch.device], float],
) -> dict[float, float]:
    """What is measured on the client's validation examples with slot `merged` as it is at each of the weights
    0, 1 / steps, ..., 1."""
    values: dict[float, float] = {}
    for step in range(steps + 1):
        with site.model.using(merged(step / steps), "merged"):
            values[step / steps] = measure(
                site.model.backbone, site.examples("val"), site.budget.batch_size, site.model.device
            )
    return values


def posterior_mean(site: Site, merged: Callable[[float], State], steps: int) -> float:
    """The mean of the weights 0, 1 / steps, ..., 1 by the likelihood of the client's validation examples; see
    `mean_by_likelihood`."""
    return mean_by_likelihood(list(on_grid(site, merged, steps, site.task.total_loss).values()), site.info.id)


def mean_by_likelihood(losses: Sequence[float], client: str) -> float:
    """`sum w exp(-L(w)) / sum exp(-L(w))` over equally spaced weights from 0 to 1, with `L(w)` the loss summed over
    examples: the mean of a weight that is uniform on this grid before the examples are seen.

    One example or none that says anything gives 0.5; many that agree give the weight of the least loss. Raises
    FloatingPointError, which names the client, where no loss is finite.
    """
    least = min(loss if math.isfinite(loss) else math.inf for loss in losses)
    if not math.isfinite(least):
        raise FloatingPointError(f"client {client}: no merge has a finite loss on the examples that weigh it")
    likely = [math.exp(least - loss) if math.isfinite(loss) else 0.0 for loss in losses]
    weights = (step / (len(losses) - 1) for step in range(len(losses)))
    return sum(w * share for w, share in zip(weights, likely, strict=True)) / sum(likely)


def check_same_start(client: Payload, received: Payload, name: str) -> None:
    """Linear mode connectivity needs both branches to start from one adapter: refuse to merge otherwise."""
    local_start, federated_start = (str(payload.scalars.get("initial", "")) for payload in (client, received))
    if local_start and local_start == federated_start:
        return
    local, federated = _fields(local_start), _fields(federated_start)
    differing = [
        f"{field} is {local.get(field, 'unknown')} at the local adapter and {federated.get(field, 'unknown')} at the "
        "federated one"
        for field in {**local, **federated}
        if local.get(field) != federated.get(field)
    ]
    raise IncompatibleAdapters(
        f"client {name}: {'; '.join(differing) or 'an adapter does not say where it started'}. Only adapters of one "
        "start are merged: same backbone, rank, alpha, targets and initial values"
    )


def _fields(start: str) -> dict[str, str]:
    """What `start_of` wrote, by field."""
    return dict(part.split("=", 1) for part in start.split("; ") if "=" in part)
