"""Rounds whose merged update is divided: clients go on from one part of it, and the rest moves into the backbone.

    W <- W + (D - s B A)   with D the update of the round, and B, A what clients go on from

So nothing of D is lost, whatever clients go on from (docs/decisions/0020-two-choices-of-a-round.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from torch import Tensor

from befit.adapters.forms import DENSE
from befit.adapters.keys import join, select, slot, split, to_slot
from befit.adapters.layout import Layout, Slot, initial_values
from befit.adapters.lowrank import stack
from befit.adapters.state import specs_of, weighted_mean
from befit.core.errors import nothing_to_deploy
from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, Payload, State, TensorSpec, Tick, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.ranked import check_ranks, rank_of, to_rank
from befit.protocol.check import unknown_clients
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Pieces, Specs, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.passes import Pass

_PIECES = "pieces"
_UPDATE = "update"  # what a piece's arrays begin with


@final
@dataclass(frozen=True)
class Folded(Method):
    """The method as a value.

    rank   of the adapter that is trained, and `alpha` its scaling
    merge  the update of a round; in the space factors it has the rank of an adapter
    go_on  what clients go on from: the "mean" of A and B, the "best" of the rank, or None: an adapter that all draw
           anew from a seed of the round
    limit  largest rank of what one round folds in; None keeps all of it
    ranks  rank by pattern of client ids; whom none fits has `rank`
    own    clients deploy what they trained last, beside the backbone that they trained it with; else all deploy what
           they would go on from now

    The backbone itself is not written to: a frozen dense slot holds the sum of what the rounds have folded in, in
    float32 and in the order of the rounds.
    """

    rank: int
    alpha: float
    merge: Merge
    go_on: Literal["mean", "best"] | None = None
    limit: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    own: bool = False
    layout: Layout = field(init=False)
    needs: Needs = field(init=False)
    use: Use = field(init=False)

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.rank)
        slots = (Slot("base", self.rank, self.alpha, form=DENSE), Slot(self.trained, self.rank, self.alpha))
        object.__setattr__(self, "layout", Layout(slots))
        object.__setattr__(self, "needs", Needs(individual_updates=self.merge.individual))
        fresh = self.go_on is None and not self.own  # an adapter that changes nothing
        object.__setattr__(self, "use", Use(("base",) if fresh else ("base", self.trained)))

    @property
    def trained(self) -> str:
        """The slot that clients train."""
        return "personal" if self.own else "shared"

    def plan(self) -> Sequence[Stage]:
        adapter = slot(self.trained)
        pieces = Pieces(adapter, self._one_piece, _PIECES)
        if self.go_on is None:
            down = Message(text="the merged updates of the rounds since the last", pieces=pieces)
        else:
            text = f"{adapter}, and what the rounds since the last have left of their updates"
            down = Message(adapter, text=text, pieces=pieces)
        alike = self.go_on is None and not self.ranks and not self.merge.individual
        mean, reads = self.merge.weights if alike else None, Gradients()
        up = Message(adapter)
        return [Stage("federate", _Federate(self), up=up, down=down, trains=adapter, mean=mean, reads=reads)]

    def _one_piece(self, adapter: Specs, replies: int) -> Specs:
        """What a round of so many replies folds in."""
        rank = self.limit or self.rank * (1 if self.merge.space == "factors" else replies)
        specs: Specs = {}
        for key, spec in adapter.items():
            factor = split(key)[2]
            if factor in ("A", "B"):
                shape = (rank, spec.shape[1]) if factor == "A" else (spec.shape[0], rank)
                specs[to_slot(key, _UPDATE)] = TensorSpec(shape)
            elif self.go_on is None:
                specs[to_slot(key, _UPDATE)] = spec
        return specs

    def work(self) -> tuple[Work, ...]:
        return (Work(("base", self.trained), slot(self.trained)),)

    def check(self, context: Context) -> list[Problem]:
        problems = unknown_clients("ranks", self.ranks, context)
        if self.go_on is None and context.started:
            text = "clients draw their adapter anew in every round; set it to null"
            problems.append(Problem("error", "adapter.start", text))
        return problems

    def server_init(self, site: ServerSite) -> Payload:
        start = {} if self.go_on is None else select(site.initial, slot(self.trained))
        return Payload(start, {"pieces": 0})

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        if not self.own:
            pieces = client.part(_PIECES) | received.part(_PIECES)
            return Deployment({**_folded(pieces, site), **self._plain(received)}, self.use.slots)
        if not client.arrays:
            raise nothing_to_deploy(site.info.id, self.trained)
        return Deployment({**_folded(client.part(_PIECES), site), **self._plain(client)}, self.use.slots)

    def following(self, updates: Sequence[Update], context: MergeContext) -> State:
        """What clients go on from."""
        best = Merge(self.merge.weights, space="delta", rank=self.rank)
        return (best if self.go_on == "best" else Merge(self.merge.weights))(updates, context)

    def _plain(self, payload: Payload) -> State:
        return select(payload.arrays, slot(self.trained))


@dataclass(frozen=True)
class _Federate(Exchange):
    """A memory holds what the rounds have folded in as numbered parts of the part `pieces`; the server's holds beside
    them what clients go on from, and how many pieces each client has."""

    method: Folded

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        last = int(server.part("has").number(client.id, 0))
        numbers = map(str, range(last + 1, int(server.number("pieces")) + 1))
        missing = Payload.of_parts({number: server.part(_PIECES, number) for number in numbers})
        return Payload(self.method._plain(server)).with_part(_PIECES, missing)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        method, chosen = self.method, slot(self.method.trained)
        pieces = client.part(_PIECES) | received.part(_PIECES)
        site.model.load(_folded(pieces, site))
        start = method._plain(received)
        if method.go_on is None:
            start = _fresh({key: spec for key, spec in site.model.specs.items() if chosen(key)}, at)
        if method.ranks:
            start = to_rank(start, rank_of(site.info.id, method.ranks, method.rank))
        site.model.load(start)
        report = yield from training(site, [Pass(chosen, ("base", method.trained))], at)
        site.report.update(report.numbers())
        trained = Payload(site.model.dump(chosen))
        kept = trained if method.own else Payload()
        return kept.with_part(_PIECES, pieces), trained

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        method, number = self.method, int(server.number("pieces")) + 1
        scale = method.layout.slot(method.trained).scale
        start = method._plain(server)
        if method.go_on is None:
            start = _fresh(specs_of(select(site.initial, slot(method.trained))), at)
        context = MergeContext(start, at.seed, at.round, {update.client.id: scale for update in updates}, scale)
        following: State = {} if method.go_on is None else method.following(updates, context)
        piece = Payload({f"{_UPDATE}/{name}": value for name, value in self._rest(updates, context, following)})
        pieces = server.part(_PIECES).with_part(str(number), piece)
        has = server.part("has") | Payload({}, {update.client.id: number - 1 for update in updates})
        return Payload(following, {"pieces": number}).with_part(_PIECES, pieces).with_part("has", has)

    def _rest(self, updates: Sequence[Update], context: MergeContext, following: State) -> Iterator[tuple[str, Tensor]]:
        """`module/B` and `module/A` whose product is what moves into the backbone; with nothing to go on from, that is
        the whole update, and the mean change of a head."""
        merge = self.method.merge
        if following:
            shares = [share / len(updates) for share in merge.shares(updates)]
            for key in (key for key in following if split(key)[2] == "B"):
                name = key.removesuffix("/B")
                pairs = [
                    (
                        self._beyond(following[key].double(), update.payload.arrays[key].double()),
                        update.payload.arrays[f"{name}/A"].double(),
                    )
                    for update in updates
                ]
                P, Q = stack(pairs, [context.scale * share for share in shares])
                yield f"{name.partition('/')[2]}/B", P.float()
                yield f"{name.partition('/')[2]}/A", Q.float()
            return
        if merge.space == "factors":
            for key, value in merge(updates, context).items():
                yield key.partition("/")[2], context.scale * value if split(key)[2] == "B" else value
            return
        for name, (P, Q) in merge.updates_of(self._cut(updates), context, self.method.limit):
            yield f"{name.partition('/')[2]}/B", P.float()
            yield f"{name.partition('/')[2]}/A", Q.float()
        heads = ({k: v for k, v in u.payload.arrays.items() if split(k)[2] not in ("A", "B")} for u in updates)
        for key, value in weighted_mean(heads, merge.shares(updates)).items():
            yield key.partition("/")[2], value

    def _beyond(self, B: Tensor, own: Tensor) -> Tensor:
        """What of a client's B is not in the B that all go on from: `sum_k p_k B_k A_k - B A` is the sum of these times
        `p_k A_k`. For A is the mean of A_k; and where B is the best of the rank, `B A` is the part of the update in the
        directions of B, whose columns are orthogonal."""
        if self.method.go_on == "mean":
            return own - B
        return own - B @ ((B.T @ own) / B.square().sum(0).clamp_min(torch.finfo(B.dtype).tiny)[:, None])

    def _cut(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Without the ranks that a client does not have: they are zero, and need not travel again."""
        if not self.method.ranks:
            return updates
        cut: list[Update] = []
        for update in updates:
            rank = rank_of(update.client.id, self.method.ranks, self.method.rank)
            sides = {"A": lambda value, rank=rank: value[:rank], "B": lambda value, rank=rank: value[:, :rank]}
            arrays = {k: sides.get(split(k)[2], lambda value: value)(v) for k, v in update.payload.arrays.items()}
            cut.append(replace(update, payload=Payload(arrays)))
        return cut


def _fresh(specs: Mapping[str, TensorSpec], at: Tick) -> State:
    """The adapter that everybody starts this round from."""
    return initial_values(specs, derive_seed(at.seed, "relora", str(at.round)))


def _folded(pieces: Payload, site: Site) -> State:
    """The dense slot: `sum_t B_t A_t`, in the order of the rounds."""
    base = {key: value.zero_() for key, value in site.model.dump(slot("base")).items()}
    for _, part in sorted(pieces.parts().items(), key=lambda item: int(item[0])):
        piece = part.arrays
        for key in sorted(piece):
            update, name, factor = split(key)
            if factor == "B":
                base[join("base", name, "weight")] += piece[key] @ piece[join(update, name, "A")]
            elif factor != "A":
                base[join("base", name, factor)] += piece[key]
    return base
