"""What every method has in common that personalises the result of another one, its base, or the bare backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import Selector, slot
from befit.adapters.layout import Layout
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.budget.allocate import RUNNING
from befit.methods.parts.budget.base import (
    MethodBlock,
    base_opening,
    base_stages,
    load_base,
    make_base,
    with_base,
    with_layout,
)
from befit.methods.parts.budget.personal import Budgets, steps_for
from befit.methods.parts.budget.stages import deploy_budgets
from befit.protocol.method import Deployment, Method, Needs, Opening
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Personal, Stage
from befit.protocol.work import Work
from befit.train.loop import Pass, train

__all__ = ["OnBase", "TrainAlone", "kept", "resume"]

_RUNNING = ("optimiser:", *(f"{name}/" for name in RUNNING))


class OnBase(Method):
    """The base's stages and memories, then our own stages; deployed is the base and the adapter in our slot.

    A subclass is a frozen dataclass that calls `prepare` and says what its `own_stages` are.
    """

    rank: int
    base: MethodBlock
    before: Method | None

    def prepare(self, layout: Layout, base: Mapping[str, Any] | None, owner: str) -> None:
        """Make the base of its block. Raises ConfigError for one that cannot be a base."""
        object.__setattr__(self, "before", None)
        before = make_base(base, [stage.name for stage in self.own_stages()], owner)
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "layout", with_layout(layout, before))
        object.__setattr__(self, "needs", Needs() if before is None else replace(before.needs, mixed=False))

    def own_stages(self) -> list[Stage]:
        raise NotImplementedError

    def own_trainable(self) -> Selector:
        return slot(BUDGETED)

    def plan(self) -> Sequence[Stage]:
        return [*base_stages(self.base, self.before), *self.own_stages()]

    def opening(self) -> Opening | None:
        return base_opening(self.base, self.before)

    def describe(self) -> dict[str, object]:
        below = {} if self.before is None else self.before.describe()
        base = "" if self.before is None else " + the base's"
        return {
            **super().describe(),
            "up": below.get("up", "nothing"),
            "down": below.get("down", "nothing"),
            "trained": str(self.trainable()),
            "deployed": f"{BUDGETED}{base}",
        }

    def trainable(self) -> Selector:
        return self.own_trainable() if self.before is None else self.before.trainable() | self.own_trainable()

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED,), slot(BUDGETED)),)

    def server_init(self, site: ServerSite) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.server_init(site))

    def client_init(self, site: Site) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.client_init(site))

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        raise NotImplementedError("the stages have exchanges of their own")

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return server

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return deploy_budgets(client, site, Budgets(self.rank))


@dataclass(frozen=True)
class TrainAlone(Personal):
    """The client trains our slot on top of its base, from the common start or from where the last round left it.

    epochs  passes over its examples, in a single round; None for train.max_steps in every round
    """

    epochs: int | None

    def stage(self) -> Stage:
        return Stage("budget", self, None if self.epochs is None else 1, uplink=False)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        base = resume(client, site)
        one = Pass(slot(BUDGETED), (*base, BUDGETED), name=BUDGETED, keep_optimiser=True)
        report = train(site, [one], at, steps=steps_for(site, self.epochs), moments=client.arrays)
        site.report.update(report.numbers())
        return kept(client, site.model.dump(slot(BUDGETED)), report.moments, at), Payload()


def resume(client: Payload, site: Site) -> tuple[str, ...]:
    """Put the client's base and, where an earlier round left one, its adapter into the model; the base's slots."""
    base = load_base(client, site)
    site.model.load({key: value for key, value in client.arrays.items() if key.startswith(f"{BUDGETED}/")})
    return base


def kept(client: Payload, adapter: State, running: State, at: Tick) -> Payload:
    """The client's memory with a new adapter; `running` is what the next round goes on from, if there is one."""
    before = {key: value for key, value in client.arrays.items() if not key.startswith(_RUNNING)}
    return Payload({**before, **adapter, **(running if at.round < at.rounds else {})}, client.scalars)
