"""FDLoRA (Qi et al. 2024): a personal adapter, a shared one that starts from the mean of these, and a weight each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

from befit.adapters.keys import NOTHING, select, slot, to_slot
from befit.adapters.layout import Slot
from befit.adapters.state import rename
from befit.core.schema import POSITIVE, Mark, at_least
from befit.core.values import ClientInfo, ClientWeights, Payload, Scalar, State, Tick, Update
from befit.merge.merge import Merge
from befit.merge.server_opt import ServerOptimiser
from befit.methods.parts.recipe.branches import two_branches
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Diagnostic
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Stage
from befit.train.passes import Pass

PERSONAL = slot("personal")
LARGEST = 1.5  # of a weight
_PAIRS = product((0.0, 0.5, 1.0), (0.0, 0.5, 1.0))
STARTS = sorted(_PAIRS, key=lambda w: abs(w[0] + w[1] - 1))  # those that sum to one first
WEIGHTS = Diagnostic(
    "number",
    ("w_shared", "w_personal"),
    "w_shared and w_personal are the weights that a client's adapters were put together by.",
)


@register("fdlora", title="FDLoRA", paper="arXiv:2406.07925", year=2024)
def fdlora(
    rank: int = 8,
    alpha: float = 16.0,
    rounds_local: Annotated[int | None, POSITIVE] = None,
    rounds_shared: Annotated[int | None, POSITIVE] = None,
    sync_every: Annotated[int, at_least(1)] = 5,
    server_lr: Annotated[float, Mark.SERVER] = 1.0,
    momentum: Annotated[float, Mark.SERVER] = 0.5,
    evaluations: Annotated[int, Mark.LOOP, at_least(1)] = 20,
    penalty: Annotated[float, at_least(0)] = 0.05,
    weights: ClientWeights = "uniform",
) -> Recipe:
    """Train a personal adapter alone, then a shared one from the mean of these; weigh the two by validation examples.

    rank           rank of both adapters, and of what is made of them
    alpha          their scaling: delta = alpha / rank * B A
    rounds_local   how many times train.max_steps to train alone; default federation.rounds
    rounds_shared  rounds of the shared adapter; default federation.rounds
    sync_every     H: after every so many rounds the personal adapter becomes what the client made of the shared one
    server_lr      step of the server
    momentum       share of the server's last step that stays, by Nesterov
    evaluations    pairs of weights that are tried at most, each by a pass over the client's validation examples
    penalty        price of the weights' mean size
    weights        how the server averages: "uniform" or "examples"

    `theta_s = mean_k theta_p,k`, then in each round `v = momentum v + D`, `theta_s += server_lr (D + momentum v)`, with
    `D = mean_k theta_s,k - theta_s`. At last `A = w_s A_s + w_p A_p`, B and a task head likewise, with
    `(w_s, w_p) = argmin L(w) + penalty (|w_s| + |w_p|) / 2` on the client's validation examples.
    up = down = r(d_in + d_out) per module and round, once more up for the personal adapter, and once more down for the
    end. Deviation: weights are looked for by a pattern search.

    Source: Qi et al. 2024, Algorithm 1; ajbarea/sphragis, scripts/fdlora_schedule.py; zyc140345/FedAMoLE,
    baselines/node.py and baselines/fdlora.py; docs/methods/fdlora.md.
    """
    recipe = two_branches(
        Fuse(evaluations, penalty),
        Slot("merged", rank, alpha),
        rank=rank,
        alpha=alpha,
        rounds_local=rounds_local,
        rounds_fedit=rounds_shared,
        weights=Merge(weights),
        splits=("val",),
        diagnostics=(WEIGHTS,),
    )
    return replace(
        recipe,
        before=(*recipe.before, SharedStart(Merge(weights))),
        after=ServerOptimiser("nesterov", server_lr, momentum),
        keep=("shared", "personal", sync_every),
    )


@dataclass(frozen=True)
class SharedStart:
    """Clients send their personal adapters, once, and the shared one starts from the mean."""

    mean: Merge
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    def stage(self, recipe: Recipe) -> Stage:
        up, counts = Message(PERSONAL), self.mean.weights
        return Stage("seed", _SharedStart(self), up, rounds=1, trains=NOTHING, mean=counts, reads=Gradients(0))


@dataclass(frozen=True)
class _SharedStart(Exchange):
    how: SharedStart

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        return client, Payload(select(client.arrays, PERSONAL))

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return Payload(rename(self.how.mean(updates), "shared"), server.scalars)


@dataclass(frozen=True)
class Fuse:
    """The weights of both adapters with the least objective that a pattern search finds; see `fdlora`.

    It starts from the best of all pairs of 0, 1/2 and 1, takes the best of a step up or down in either weight, and
    where none is better takes steps half as long, the first of 1/4.
    """

    evaluations: int
    penalty: float

    def __call__(self, site: Site, at: Tick, client: Payload) -> tuple[State, dict[str, Scalar]]:
        shared, own = site.model.dump(slot("shared")), site.model.dump(PERSONAL)

        def merged(w: tuple[float, float]) -> State:
            return {to_slot(k, "merged"): w[0] * v + w[1] * own[to_slot(k, "personal")] for k, v in shared.items()}

        examples, size = site.examples("val"), site.budget.batch_size
        tried: dict[tuple[float, float], float] = {}

        def objective(w: tuple[float, float]) -> float:
            if w not in tried:
                with site.model.using(merged(w), "merged"):
                    loss = site.task.total_loss(site.model.backbone, examples, size, site.model.device) / len(examples)
                tried[w] = loss + self.penalty * (abs(w[0]) + abs(w[1])) / 2 if math.isfinite(loss) else math.inf
            return tried[w]

        best, step = min(STARTS[: self.evaluations], key=objective), 0.25
        least = tried[best]
        while len(tried) < self.evaluations and step > 1e-3:
            moves = [(best[0] + up * step, best[1] + right * step) for up, right in ((1, 0), (-1, 0), (0, 1), (0, -1))]
            inside = [w for w in moves if max(map(abs, w)) <= LARGEST]
            candidate = min(inside[: self.evaluations - len(tried)], key=objective, default=best)
            if objective(candidate) < least:
                best, least = candidate, tried[candidate]
            else:
                step /= 2
        site.report.update({"w_shared": best[0], "w_personal": best[1]})
        return merged(best), {"w_shared": best[0], "w_personal": best[1]}
