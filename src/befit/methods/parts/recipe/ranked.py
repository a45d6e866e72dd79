"""One shared adapter of which every client has as many ranks as it can carry (HetLoRA, FlexLoRA).

Ranks beyond a client's own are zero in A and in B, and stay zero: the gradient of either is a product with the other.
So a client of rank r trains exactly what an adapter of rank r would be, in arrays of the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, final

from torch import Tensor

from befit.adapters.keys import select, slot, split
from befit.adapters.layout import Layout
from befit.core.errors import ConfigError
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.merge.merge import MergeContext
from befit.protocol.check import unknown_clients
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.passes import Pass
from befit.train.terms import Term

MergeRanks = Callable[[Sequence[Update], MergeContext], State]


class RankRule(Protocol):
    """What a client does about its rank while it trains."""

    def terms(self, rank: int) -> tuple[Term, ...]: ...

    def next_rank(self, rank: int, before: State, after: State) -> int:
        """The client's rank from the next round on."""
        ...


@dataclass(frozen=True)
class FixedRank:
    """Nothing: it stays."""

    def terms(self, rank: int) -> tuple[Term, ...]:
        return ()

    def next_rank(self, rank: int, before: State, after: State) -> int:
        return rank


@final
@dataclass(frozen=True)
class Ranked(Method):
    """The method as a value.

    layout  one slot, `shared`, at the largest rank
    ranks   rank by pattern of client ids; whom none fits has the largest
    merge   how updates of all ranks become one
    rule    how a client's rank develops
    """

    layout: Layout
    merge: MergeRanks
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    rule: RankRule = field(default_factory=FixedRank)
    needs: Needs = Needs(individual_updates=True)  # noqa: RUF009 frozen

    use = Use(("shared",))

    def __post_init__(self) -> None:
        check_ranks(self.ranks, max(slot.rank for slot in self.layout.slots))

    def plan(self) -> Sequence[Stage]:
        adapter = Message(slot("shared"))
        return [Stage("federate", _Federate(self), up=adapter, down=adapter, trains=slot("shared"), reads=Gradients())]

    def check(self, context: Context) -> list[Problem]:
        return unknown_clients("ranks", self.ranks, context)

    def work(self) -> tuple[Work, ...]:
        return (Work(("shared",), slot("shared")),)

    def server_init(self, site: ServerSite) -> Payload:
        return Payload(select(site.initial, slot("shared")))

    def client_init(self, site: Site) -> Payload:
        return Payload({}, {"rank": rank_of(site.info.id, self.ranks, self.layout.slot("shared").rank)})

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return Deployment(to_rank(received.arrays, int(client.number("rank"))), self.use.slots)


@dataclass(frozen=True)
class _Federate(Exchange):
    method: Ranked

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """What the client starts from, at the rank that the configuration gives it: what it would cut away is then no
        part of its update, to the guard and the wire. Ranks that it has pruned since are: it sends zeros there."""
        largest = self.method.layout.slot("shared").rank
        return Payload(to_rank(server.arrays, rank_of(client.id, self.method.ranks, largest)), server.scalars)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        rule, rank = self.method.rule, int(client.number("rank"))
        before = to_rank(received.arrays, rank)
        site.model.load(before)
        report = yield from training(site, [Pass(slot("shared"), ("shared",), rule.terms(rank))], at)
        site.report.update({**report.numbers(), "rank": float(rank)})
        after = site.model.dump(slot("shared"))
        return Payload({}, {"rank": rule.next_rank(rank, before, after)}), Payload(after)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        scale = self.method.layout.slot("shared").scale
        scales = {update.client.id: scale for update in updates}
        return Payload(self.method.merge(updates, MergeContext(server.arrays, at.seed, at.round, scales, scale)))


def to_rank(state: Mapping[str, Tensor], rank: int) -> State:
    """The first ranks of every A and B, and zeros for the others; what has no rank stays as it is."""
    cut: State = {}
    for key, value in state.items():
        factor = split(key)[2]
        if factor in ("A", "B"):
            value = value.clone()
            (value if factor == "A" else value.T)[rank:] = 0
        cut[key] = value
    return cut


def rank_of(client: str, ranks: Mapping[str, int], largest: int) -> int:
    """The rank of the first pattern that fits; the largest where none does.

    >>> rank_of("phone-3", {"phone-*": 2}, 8), rank_of("server-1", {"phone-*": 2}, 8)
    (2, 8)
    """
    return next((rank for pattern, rank in ranks.items() if fnmatchcase(client, pattern)), largest)


def check_ranks(ranks: Mapping[str, int], largest: int) -> None:
    """Raise ConfigError for ranks that no client can have."""
    problems = [
        f"ranks: {pattern} has rank {rank}, which must be from 1 to rank, {largest}"
        for pattern, rank in ranks.items()
        if not 1 <= rank <= largest
    ]
    if problems:
        raise ConfigError(problems, "the method")
