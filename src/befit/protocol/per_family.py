"""Clients with different backbones: a method that knows one backbone, run once for each.

A *family* is the clients that share a backbone, by its fingerprint. `ByFamily` gives every family a server memory of
its own and lets the method see one family at a time, so that arrays of different width never meet (the grouping of
Fed-ET, Cho et al. 2022, by architecture). A method that lets families learn from each other says `Needs(mixed=True)`,
and groups for itself, or does so in what comes `after` the grouping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from befit.adapters.keys import Selector
from befit.adapters.layout import Layout, ModelShapes
from befit.adapters.mixers import Mix
from befit.core.values import ClientInfo, Payload, TensorSpec, Tick, Update
from befit.protocol.method import Deployment, Method, Needs
from befit.protocol.stage import Exchange, Stage
from befit.protocol.work import PublicWork, Work

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings
    from befit.protocol.site import ServerSite, Site

__all__ = ["After", "ByFamily", "each_family", "join", "part"]

_MARK = "@"


class After(Protocol):
    """What the server does with the memories of all families once each has aggregated its updates."""

    def __call__(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload: ...

    @property
    def work(self) -> PublicWork:
        """What it computes in a round, for estimates."""
        ...


def each_family(method: Method, families: int) -> Method:
    """The method itself where it can serve this many families, else one that serves them one by one."""
    return method if families < 2 or method.needs.mixed else ByFamily(method)


def part(memory: Payload, family: str) -> Payload:
    """What a server's memory holds of one family, by the names that the method gave."""
    prefix = family + _MARK
    return Payload(
        {key.removeprefix(prefix): value for key, value in memory.arrays.items() if key.startswith(prefix)},
        {key.removeprefix(prefix): value for key, value in memory.scalars.items() if key.startswith(prefix)},
    )


def join(parts: Mapping[str, Payload]) -> Payload:
    """One memory from those of all families, every name marked with its family's."""
    return Payload(
        {family + _MARK + key: value for family, one in parts.items() for key, value in one.arrays.items()},
        {family + _MARK + key: value for family, one in parts.items() for key, value in one.scalars.items()},
    )


@dataclass(frozen=True)
class _Grouped(Exchange):
    exchange: Exchange
    after: After | None = None

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.exchange.dispatch(part(server, client.backbone), client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        return self.exchange.client_update(client, received, site, at)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """Every family's updates by themselves; a family of which nobody replied keeps what it had."""
        parts: dict[str, Payload] = {}
        for family in site.families:
            own = [update for update in updates if update.client.backbone == family]
            before = part(server, family)
            parts[family] = self.exchange.aggregate(before, own, site.only(family), at) if own else before
        joined = join(parts)
        return joined if self.after is None else self.after(joined, updates, site, at)

    def uplink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.exchange.uplink(stage, specs)

    def uplink_numbers(self, stage: Stage) -> frozenset[str]:
        return self.exchange.uplink_numbers(stage)

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.exchange.downlink(stage, specs)


@dataclass(frozen=True)
class ByFamily(Method):
    """`method` for each family of clients by itself.

    after  how families then learn from each other at the server, on public records and with the backbones
    """

    method: Method
    after: After | None = None

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        if self.after is None:
            return self.method.needs
        return replace(self.method.needs, individual_updates=True, mixed=True, public=True, server_model=True)

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.method.layout

    @property
    def mixer(self) -> Mix:  # type: ignore[override]
        return self.method.mixer

    def plan(self) -> Sequence[Stage]:
        return [
            replace(stage, exchange=_Grouped(stage.exchange, self.after if stage.uplink else None))
            for stage in self.method.plan()
        ]

    def arrival(self) -> Stage | None:
        stage = self.method.arrival()
        return None if stage is None else replace(stage, exchange=_Grouped(stage.exchange))

    def describe(self) -> dict[str, object]:
        return self.method.describe()

    def trainable(self) -> Selector:
        return self.method.trainable()

    def remarks(self, budget: TrainSettings) -> list[str]:
        return self.method.remarks(budget)

    def faults(self, shapes: ModelShapes, clients: Sequence[str]) -> list[str]:
        return self.method.faults(shapes, clients)

    def work(self) -> tuple[Work, ...]:
        return self.method.work()

    def public_work(self) -> PublicWork:
        return self.method.public_work() if self.after is None else self.after.work

    def server_init(self, site: ServerSite) -> Payload:
        return join({family: self.method.server_init(site.only(family)) for family in site.families})

    def client_init(self, site: Site) -> Payload:
        return self.method.client_init(site)

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return self.method.deploy(client, received, site)

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.method.dispatch(part(server, client.backbone), client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        return self.method.client_update(client, received, site, at)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return _Grouped(self.method, self.after).aggregate(server, updates, site, at)

    def uplink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.method.uplink(stage, specs)

    def uplink_numbers(self, stage: Stage) -> frozenset[str]:
        return self.method.uplink_numbers(stage)

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.method.downlink(stage, specs)
