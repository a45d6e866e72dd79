"""What every method has in common that personalises the result of another one, its base, or the bare backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout
from befit.core.values import Payload, State, Tick
from befit.methods.parts.budget.allocate import ALLOCATION
from befit.methods.parts.budget.base import MethodBlock, base_stages, load_base, make_base, with_base, with_layout
from befit.methods.parts.budget.personal import Budgets, steps_for
from befit.methods.parts.budget.stages import deploy_budgets
from befit.protocol.method import Deployment, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Personal, Stage
from befit.protocol.work import Work
from befit.train.loop import Pass, train
from befit.train.optim import MOMENTS

__all__ = ["OnBase", "TrainAlone", "kept", "resume"]


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
        reported = () if before is None else before.diagnostics
        object.__setattr__(self, "diagnostics", (*reported, *type(self).diagnostics))

    def own_stages(self) -> list[Stage]:
        raise NotImplementedError

    def plan(self) -> Sequence[Stage]:
        return [*base_stages(self.base, self.before), *self.own_stages()]

    @property
    def use(self) -> Use:  # type: ignore[override]
        return Use((*(() if self.before is None else self.before.use.slots), BUDGETED))

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED,), slot(BUDGETED)),)

    def server_init(self, site: ServerSite) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.server_init(site))

    def client_init(self, site: Site) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.client_init(site))

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return deploy_budgets(client, site, Budgets(self.rank))


@dataclass(frozen=True)
class TrainAlone(Personal):
    """The client trains our slot on top of its base, from the common start or from where the last round left it.

    epochs  passes over its examples, in a single round; None for train.max_steps in every round
    """

    epochs: int | None

    def stage(self) -> Stage:
        rounds = None if self.epochs is None else 1
        return Stage("budget", self, rounds=rounds, trains=slot(BUDGETED))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        base = resume(client, site)
        one = Pass(slot(BUDGETED), (*base, BUDGETED), name=BUDGETED, keep_optimiser=True)
        report = train(site, [one], at, steps=steps_for(site, self.epochs), memory=client)
        site.report.update(report.numbers())
        return kept(client, site.model.dump(slot(BUDGETED)), report.memory, at), Payload()


def resume(client: Payload, site: Site) -> tuple[str, ...]:
    """Put the client's base and, where an earlier round left one, its adapter into the model; the base's slots."""
    base = load_base(client, site)
    site.model.load(select(client.arrays, slot(BUDGETED)))
    return base


def kept(client: Payload, adapter: State, running: Payload, at: Tick) -> Payload:
    """The client's memory with a new adapter; `running` is what the next round goes on from, if there is one."""
    rest = client.with_part(MOMENTS, Payload()).with_part(ALLOCATION, Payload())
    return rest | Payload(adapter) | (running if at.round < at.rounds else Payload())
