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

from befit.core.values import ClientInfo, Payload, Tick, Update
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Method, Needs, Wrapped
from befit.protocol.stage import Exchange, Stage
from befit.protocol.work import PublicWork

if TYPE_CHECKING:
    from befit.protocol.site import ServerSite, Site


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


@dataclass(frozen=True)
class _PerFamilyExchange(Exchange):
    exchange: Exchange
    after: After | None = None

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.exchange.dispatch(server.part(client.backbone), client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated] | Updated:
        return self.exchange.client_update(client, received, site, at)

    @property
    def asks(self) -> bool:
        return self.exchange.asks

    @property
    def lone(self) -> str:
        return self.exchange.lone

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """Every family's updates by themselves; a family without replies keeps its memory."""
        memories: dict[str, Payload] = {}
        for family in site.families:
            own = [update for update in updates if update.client.backbone == family]
            before = server.part(family)
            memories[family] = self.exchange.aggregate(before, own, site.only(family), at) if own else before
        joined = Payload.of_parts(memories)
        return joined if self.after is None else self.after(joined, updates, site, at)


@dataclass(frozen=True)
class ByFamily(Wrapped):
    """`method` for each family of clients by itself: each of its stages, and the rest of its contract.

    after  how families then learn from each other at the server, on public records and with the backbones
    """

    after: After | None = None

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        if self.after is None:
            return self.method.needs
        return replace(self.method.needs, individual_updates=True, mixed=True, public=True, server_model=True)

    def plan(self) -> Sequence[Stage]:
        return [self._grouped(stage) for stage in self.method.plan()]

    def _grouped(self, stage: Stage) -> Stage:
        if self.after is None or not stage.federated:
            return replace(stage, exchange=_PerFamilyExchange(stage.exchange))
        # What families learn from each other is not in what the stage says of itself.
        return replace(stage, exchange=_PerFamilyExchange(stage.exchange, self.after), shared=None, mean=None)

    def public_work(self) -> PublicWork:
        return self.method.public_work() if self.after is None else self.after.work

    def server_init(self, site: ServerSite) -> Payload:
        return Payload.of_parts({family: self.method.server_init(site.only(family)) for family in site.families})

    def influence(self, server: Payload) -> Mapping[str, Mapping[str, float]]:
        families = server.parts().values()
        return {client: row for family in families for client, row in self.method.influence(family).items()}
