"""Cross-fitting: weigh two branches by training examples that neither has seen, so that nobody holds any out.

Every client's training examples are in three parts. For each part both branches are trained once more, in a federation
of clients that all leave it out, and their merges are measured on it. The losses of all parts weigh the two branches
that were trained on everything.

A newcomer has part in no federation, so its examples judge the federated adapter of everything itself.

It takes a federation for each part. An adapter that was averaged over clients who trained on their parts fits them too
well to be compared there with an adapter that did not: the weight would then be near 1 whatever federating is worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from befit.adapters.keys import NOTHING, select, slot
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.merge.pair import merge_pair
from befit.merge.server_opt import PRIVATE
from befit.methods.parts.recipe.branches import mean_by_likelihood, on_grid
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.jobs import Steps, Updated, steps_of
from befit.protocol.method import Wrapped
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Personal, Stage

FOLDS = 3  # more cost more, and in two a client's own branch would lack half of its examples
_WORST = 1e300  # a loss that is not finite, as a number that is: only such are kept
_FOLD, _LOSSES = "fold-", "losses"


@dataclass(frozen=True)
class CrossFitted(Wrapped):
    """A recipe of `two_branches` whose rule takes `cross_fitted_mean`.

    steps  merges are measured at the weights 0, 1 / steps, ..., 1
    space  how the branches are merged then, see `merge_pair`
    """

    method: Recipe
    steps: int = 10
    space: str = "factors"

    def plan(self) -> Sequence[Stage]:
        local, federate, merge = self.method.plan()
        measured = Stage(
            "weigh",
            _Measure(self.method, self.steps, self.space),
            None,
            self.method.download,
            1,
            trains=NOTHING,
            reads="losses of merged branches",
        )
        folds = [
            replace(
                stage,
                name=f"{stage.name}-{number}",
                exchange=_InFold(stage.exchange, number, stage.federated),
                lasts=False,
                shared=None,
                parts=FOLDS,
            )
            for number in range(1, FOLDS + 1)
            for stage in (local, federate, measured)
        ]
        if federate.shared is not None:
            places = tuple(_at_server(number) for number in range(1, FOLDS + 1))
            federate = replace(federate, shared=replace(federate.shared, others=places))
        # The federation of everything comes last, so that the server's own memory is the initial one until then, and
        # what is scored and kept of the rounds is of it; the local branch comes first, as where runs share it.
        return [local, *folds, federate, merge]


def cross_fitted_mean(site: Site, client: Payload) -> float:
    """The mean weight by the likelihood of all training examples of a client, each measured with branches that have not
    seen it; 0.5 where the client took part in no fold. `client` is its memory. See `mean_by_likelihood`."""
    parts = (part.scalars.get(_LOSSES) for name, part in client.parts().items() if name.startswith(_FOLD))
    measured = [[float(loss) for loss in losses] for losses in parts if isinstance(losses, list)]
    return mean_by_likelihood([sum(losses) for losses in zip(*measured, strict=True)] or [0.0, 0.0], site.info.id)


def _at_server(number: int) -> str:
    """Name of the part of the server's memory that is a fold's."""
    return f"{PRIVATE}{_FOLD}{number}"


@dataclass(frozen=True)
class _InFold(Exchange):
    """A stage without one part of every client's training examples, and with memories of its own."""

    exchange: Exchange
    number: int
    federated: bool

    @property
    def _at_client(self) -> str:
        return f"{_FOLD}{self.number}"

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """A fold's first round starts from what the server holds itself, which is still as it was at first. Who comes
        when all is over measures with the federation of everything, which has seen nothing of the newcomer."""
        memory = server.part(_at_server(self.number))
        if not (memory.arrays or memory.scalars or self.federated):
            return Payload()
        return self.exchange.dispatch(memory if memory.arrays else server, client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        part, memory = site.in_part(self.number, FOLDS), client.part(self._at_client)
        memory, reply = yield from steps_of(self.exchange.client_update(memory, received, part, at))
        return client.with_part(self._at_client, memory), reply

    @property
    def lone(self) -> str:
        return self.exchange.lone

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        memory = self.exchange.aggregate(server.part(_at_server(self.number)), updates, site, at)
        return server.with_part(_at_server(self.number), memory)


@dataclass(frozen=True)
class _Measure(Personal):
    """Measure merges of a fold's two branches on the part that it leaves out, and keep the losses alone."""

    recipe: Recipe
    steps: int
    space: str

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        if not select(client.arrays, slot("personal")) or not received.arrays:  # it was away, or all its family was
            return Payload(), Payload()
        self.recipe.restore(client, received, site)
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))

        def merged(w: float) -> State:
            return merge_pair(fed, local, {"": w}, self.space)

        losses = on_grid(site, merged, self.steps, site.task.total_loss)
        return Payload({}, {_LOSSES: [loss if math.isfinite(loss) else _WORST for loss in losses.values()]}), Payload()

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return Payload({}, {"over": 1.0})  # nothing else of this fold, whose work is done
