"""FedMKT (Fan et al. 2025): clients and server models teach each other by their predictions for public records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from torch import Tensor

from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout, Slot
from befit.adapters.state import rename, specs_of
from befit.core.errors import DataError, nothing_to_deploy
from befit.core.schema import POSITIVE
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.distil.ensemble import budget_of, public_of
from befit.methods.parts.distil.knowledge import (
    KNOWLEDGE,
    LOSSES,
    OWN,
    TOKENS,
    Knowledge,
    Lesson,
    best_lessons,
    distil_adapter,
    lower_loss_targets,
    predict_public,
)
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import view
from befit.methods.parts.distil.translate import View
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Needs, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Specs, Stage
from befit.protocol.work import PublicWork, Work
from befit.train.loop import training
from befit.train.passes import Pass


@register("fedmkt", title="FedMKT", paper="arXiv:2406.02224", year=2025)
@dataclass(frozen=True)
class FedMKT(Method):
    """No adapter travels: clients send their predictions for public records, and learn from the server's better ones.

    rank       rank of every adapter
    alpha      its scaling: delta = alpha / rank * B A
    positions  of how many answer tokens of a public record, the first ones, probabilities travel
    distil     public records, steps and rate of the distillation, see `Distillation`

    For each public record the client with the lowest loss; where that is below the loss of a backbone's server model,
    the server model learns its probabilities; a client learns its server model's where that one's loss is below its
    own. Cross-entropy at temperature 1 over answer tokens.
    up = down = samples (1 + positions k) entries and the k tokens of each position, k = min(top, vocabulary); with all
    classes of a classifier no tokens. Deviation: a client learns from the server at the start of its next round.

    Source: Fan et al. 2025, Algorithms 1 and 2; snumprlab/fedmosaic, federated_methods/fedmkt.py;
    docs/methods/fedmkt.md.
    """

    rank: int = 8
    alpha: float = 16.0
    positions: Annotated[int, POSITIVE] = 64
    distil: Distillation = Distillation()  # noqa: RUF009 frozen
    layout: Layout = field(init=False)

    needs = Needs(individual_updates=True, mixed=True, public=True, public_at_clients=True, server_model=True)
    use = Use(("personal",))

    def __post_init__(self) -> None:
        knowledge = Knowledge(self.distil.samples, self.positions, self.distil.top)
        object.__setattr__(self, "layout", Layout((Slot("personal", self.rank, self.alpha),), extras=(knowledge,)))

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(slot("personal"), ("personal",), keep_optimiser=True),)

    def plan(self) -> Sequence[Stage]:
        federate, reads = _Federate(self), Gradients()
        return [Stage("federate", federate, _PREDICTIONS, _PREDICTIONS, trains=slot("personal"), reads=reads)]

    def work(self) -> tuple[Work, ...]:
        return tuple(work for step in self.passes for work in step.work)

    def public_work(self) -> PublicWork:
        """Everybody predicts all records, and learns at most all of them."""
        personal = slot("personal")
        both = (Work(("personal",), times=self.distil.samples), Work(("personal",), personal, times=self.distil.passes))
        return PublicWork(client=both, server=both)

    def server_init(self, site: ServerSite) -> Payload:
        """An adapter for every backbone, at its start."""
        starts = {family: select(start, slot("personal")) for family, start in site.starts.items()}
        return Payload.of_parts({family: Payload(rename(start, "server")) for family, start in starts.items()})

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        if not client.arrays:
            raise nothing_to_deploy(site.info.id, "personal")
        return Deployment(select(client.arrays, slot("personal")), self.use.slots)


def _as_sent(knowledge: Specs) -> Specs:
    """Tokens travel as whole numbers; all other arrays as the layout declares them."""
    return {key: replace(spec, dtype="int32") if key == TOKENS else spec for key, spec in knowledge.items()}


_PREDICTIONS = Message(slot(KNOWLEDGE), become=_as_sent)


@dataclass(frozen=True)
class _Federate(Exchange):
    method: FedMKT

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """The predictions of the client's server model; nothing in the first round, before it has learnt."""
        return Payload(select(server.part(client.backbone).arrays, slot(KNOWLEDGE)))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        if site.public is None:
            raise DataError(f"client {site.info.id} has no public records")
        examples = site.public()
        how = self.method.distil
        chosen = how.records(len(examples), at)
        lessons: dict[int, Lesson] = {}
        if client.arrays and received.arrays:
            server_lessons = [Lesson.of(OWN, received.arrays, number) for number in range(len(chosen))]
            lessons = lower_loss_targets(server_lessons, client.arrays[LOSSES])
        adapter = select(client.arrays or site.model.dump(slot("personal")), slot("personal"))

        def seen_by(_: str, places: Tensor) -> View:
            return view(site, examples, places)

        site.model.load(distil_adapter(site, adapter, lessons, chosen, seen_by, how, site.budget, at, site.info.id))
        report = yield from training(site, self.method.passes, at, memory=client)
        site.report |= {**report.numbers(), "lessons": float(len(lessons))}
        with site.model.active("personal"):
            predictions = predict_public(site, examples, chosen, _PREDICTIONS.specs(site.model.specs), how.batch_size)
        kept = Payload({**site.model.dump(slot("personal")), LOSSES: predictions[LOSSES]})
        return client | kept | report.memory, Payload(predictions)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """Every backbone's server model learns where a client's loss is lower, and then predicts all records anew."""
        chosen = self.method.distil.records(len(public_of(site)(site.families[0])), at)
        best = best_lessons(updates, len(chosen))
        return Payload.of_parts(
            {
                family: Payload(self._taught(server.part(family).arrays, family, best, chosen, site, at))
                for family in site.families
            }
        )

    def _taught(
        self, memory: State, family: str, best: Sequence[Lesson], chosen: Tensor, site: ServerSite, at: Tick
    ) -> State:
        """One backbone's server model after the round, and its predictions."""
        how, backbone, public = self.method.distil, site.backbones[family], public_of(site)
        specs = _PREDICTIONS.specs(specs_of(site.starts[family]))
        state = rename(select(memory, slot("server")), "personal")

        def seen_by(name: str, places: Tensor) -> View:
            return view(site.backbones[name or family], public(name or family), places)

        def predict(state: State) -> State:
            with backbone.model.using(state, "personal"):
                return predict_public(backbone, public(family), chosen, specs, how.batch_size)

        losses = memory[LOSSES] if LOSSES in memory else predict(state)[LOSSES]
        lessons = lower_loss_targets(best, losses)
        state = distil_adapter(backbone, state, lessons, chosen, seen_by, how, budget_of(site), at, f"server {family}")
        return {**rename(state, "server"), **predict(state)}
