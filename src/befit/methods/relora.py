"""ReLoRA in a federation: every round's merged update moves into the backbone, and the adapters start afresh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from befit.adapters.forms import DENSE
from befit.adapters.keys import join, select, slot, slot_of, split, to_slot
from befit.adapters.layout import Layout, Slot, initial_values
from befit.adapters.state import specs_of, weighted_mean
from befit.core.errors import ConfigError, NotTrained
from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, Payload, State, TensorSpec, Tick, Update
from befit.merge.merge import Merge, MergeContext
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Needs, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Specs, Stage
from befit.protocol.work import Work
from befit.train.loop import Pass, training

_PIECES = "pieces"
_UPDATE = "update"  # what a piece's arrays begin with


@register("relora", title="ReLoRA merging", paper="arXiv:2307.05695", year=2025)
@dataclass(frozen=True)
class Relora(Method):
    """Fold the whole merged update into every client's backbone after each round, and draw fresh adapters.

    rank         rank of the adapters
    alpha        their scaling: delta = alpha / rank * B A
    merge        space, rule and finish of the merge, see `Merge`
    relora_rank  largest rank of what one round folds in; null keeps all of it, up to rank times the clients

    `W <- W + dW_G`, never cut to the rank of an adapter in the spaces knots and delta; A of round t comes from a seed
    of that round, B = 0, the optimiser is new.
    up = down = r(d_in + d_out) per module in the space factors; in the others down has the rank of the round's update
    in the place of r, and a client that missed rounds gets all that it missed. The backbone itself is not written to:
    a frozen dense slot holds the sum, in float32 and in the order of the rounds. Deployed is the backbone that the
    client trained on last, with its adapter.
    Deviation: no pruning of the optimiser and no second warm-up, as the adapters' optimiser is new in every round; a
    task head's mean change is folded in like the rest.

    Source: Lialin et al. 2023, Algorithm 1; Piorczynski et al. 2025, Table 1; docs/methods/relora.md.
    """

    rank: int = 8
    alpha: float = 16.0
    merge: Merge = Merge()  # noqa: RUF009 frozen
    relora_rank: int | None = None
    layout: Layout = field(init=False)
    needs: Needs = field(init=False)

    use = Use(("base", "personal"))

    def __post_init__(self) -> None:
        problems = [f"relora_rank: must be at least 1, got {self.relora_rank}"] * (
            self.relora_rank is not None and self.relora_rank < 1
        )
        if self.merge.space == "factors" and self.relora_rank is not None:
            problems.append("relora_rank: the space factors gives an update of the adapter's rank; nothing to cut")
        if self.merge.rank is not None:
            problems.append("merge.rank: nothing is cut to an adapter; relora_rank limits what is folded in")
        if self.merge.split != "even":
            problems.append("merge.split: nothing becomes an adapter again, whose factors share the singular values")
        if self.merge.rule == "fisher":
            problems.append("merge.rule: fisher needs the clients' Fisher information, which relora does not send")
        if problems:
            raise ConfigError(problems, "relora")
        slots = (Slot("base", self.rank, self.alpha, form=DENSE), Slot("personal", self.rank, self.alpha))
        object.__setattr__(self, "layout", Layout(slots))
        object.__setattr__(self, "needs", Needs(individual_updates=self.merge.individual))

    def plan(self) -> Sequence[Stage]:
        personal = slot("personal")
        text = "the merged updates of the rounds since the last"
        down = Message(personal, become=self._one_piece, text=text, pieces=_PIECES)
        return [Stage("federate", _Federate(self), up=Message(personal), down=down, trains=personal, reads=Gradients())]

    def _one_piece(self, adapter: Specs) -> Specs:
        """One round's update at the adapter's rank, or at `relora_rank`; without a limit it may have more."""
        rank = self.relora_rank or self.rank
        return {
            to_slot(key, _UPDATE): TensorSpec(
                {"A": (rank, spec.shape[-1]), "B": (spec.shape[0], rank)}.get(split(key)[2], spec.shape)
            )
            for key, spec in adapter.items()
        }

    def work(self) -> tuple[Work, ...]:
        return (Work(("base", "personal"), slot("personal")),)

    def server_init(self, site: ServerSite) -> Payload:
        return Payload({}, {"pieces": 0})

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        if not client.arrays:
            raise NotTrained(
                f"client {site.info.id} has no adapter of its own: it never completed a round, so there is nothing to "
                "deploy"
            )
        own = select(client.arrays, slot("personal"))
        return Deployment({**_folded(client.part(_PIECES), site), **own}, self.use.slots)


@dataclass(frozen=True)
class _Federate(Exchange):
    """A memory holds what the rounds have folded in as numbered parts of the part `pieces`; the server's holds beside
    them how many of them each client has."""

    method: Relora

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        known = int(server.part("has").number(client.id, 0))
        pieces, missing = server.part(_PIECES), Payload()
        for number in range(known + 1, int(server.number("pieces")) + 1):
            missing = missing.with_part(str(number), pieces.part(str(number)))
        return Payload().with_part(_PIECES, missing)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        pieces = client.part(_PIECES) | received.part(_PIECES)
        site.model.load(_folded(pieces, site))
        personal = {key: spec for key, spec in site.model.specs.items() if slot_of(key) == "personal"}
        site.model.load(_fresh(personal, at))
        report = yield from training(site, [Pass(slot("personal"), ("base", "personal"))], at)
        site.report.update(report.numbers())
        trained = Payload(site.model.dump(slot("personal")))
        return trained.with_part(_PIECES, pieces), trained

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        number = int(server.number("pieces")) + 1
        piece = Payload({f"{_UPDATE}/{rest}": value for rest, value in self._merged(updates, site, at)})
        pieces = server.part(_PIECES).with_part(str(number), piece)
        has = server.part("has") | Payload({}, {update.client.id: number - 1 for update in updates})
        return Payload({}, {"pieces": number}).with_part(_PIECES, pieces).with_part("has", has)

    def _merged(self, updates: Sequence[Update], site: ServerSite, at: Tick) -> Iterator[tuple[str, Tensor]]:
        """`module/B` and `module/A` whose product is the merged update, and the mean change of a head."""
        merge, limit, scale = self.method.merge, self.method.relora_rank, self.method.layout.slot("personal").scale
        start = _fresh(specs_of(select(site.initial, slot("personal"))), at)
        context = MergeContext(start, at.seed, at.round, {update.client.id: scale for update in updates}, scale)
        if merge.space == "factors":
            for key, value in merge(updates, context).items():
                yield key.partition("/")[2], scale * value if split(key)[2] == "B" else value
            return
        for name, (P, Q) in merge.updates_of(updates, context, limit):
            yield f"{name.partition('/')[2]}/B", P.float()
            yield f"{name.partition('/')[2]}/A", Q.float()
        heads = ({k: v for k, v in u.payload.arrays.items() if split(k)[2] not in ("A", "B")} for u in updates)
        for key, value in weighted_mean(heads, merge.shares(updates)).items():
            yield key.partition("/")[2], value


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
