"""The composed method: orthogonal parts, each a small value, that together answer what a federated method is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from befit.adapters.keys import NOTHING, Selector, select, slot, slot_of, union
from befit.adapters.layout import Layout
from befit.adapters.mixers import Mix
from befit.adapters.state import rename
from befit.core.errors import NotTrained
from befit.core.values import ClientInfo, Payload, Scalar, TensorSpec, Tick, Update
from befit.merge.merge import Merge, MergeContext
from befit.merge.server_opt import ServerOptimiser
from befit.methods.parts.recipe.personal import PersonalStage, Use, start_of
from befit.methods.parts.recipe.route import Broadcast, Route
from befit.protocol.method import Deployment, Method, Needs, Opening
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Stage
from befit.protocol.work import Work
from befit.train.loop import Pass, train

__all__ = ["Recipe"]


@final
@dataclass(frozen=True)
class Recipe(Method):
    """A method as a value.

    layout  which slots exist, with what factors and rank
    passes  what is optimised in a federated round, in which order, with which guidance
    in_sequence  each pass goes over all batches of a round before the next one starts
    start   (from, into): a round starts with the values of one slot copied into another
    after   what the server does with what the merge made
    share   which arrays go up; nothing at all makes the method purely personal
    merge   how updates become one
    route   who gets what, and under which slot it arrives
    before  personal stages ahead of the federated one
    then    personal stages after it
    use     what is deployed
    rounds  rounds of the federated stage; None takes the configuration's
    begins  the first stages, where other methods begin with the same ones
    """

    layout: Layout
    use: Use
    passes: tuple[Pass, ...] = ()
    share: Selector = NOTHING
    merge: Merge = field(default_factory=Merge)
    route: Route = field(default_factory=Broadcast)
    before: tuple[PersonalStage, ...] = ()
    then: tuple[PersonalStage, ...] = ()
    rounds: int | None = None
    in_sequence: bool = False
    start: tuple[str, str] | None = None
    after: ServerOptimiser | None = None
    begins: Opening | None = None
    needs: Needs = field(default_factory=Needs)

    def opening(self) -> Opening | None:
        return self.begins

    def plan(self) -> Sequence[Stage]:
        federated = [Stage("federate", self, self.rounds)] if self.share != NOTHING else []
        return [
            *(Stage(stage.name, stage.exchange(self), stage.rounds, uplink=False) for stage in self.before),
            *federated,
            *(Stage(stage.name, stage.exchange(self), stage.rounds, uplink=False) for stage in self.then),
        ]

    @property
    def mixer(self) -> Mix:  # type: ignore[override]
        return self.use.mixer

    def describe(self) -> dict[str, object]:
        arrives = self.route.arrives(self.share) if self.share != NOTHING else NOTHING
        return {
            **super().describe(),
            "up": str(self.share),
            "down": str(arrives),
            "trained": str(self.trainable()),
            "deployed": " + ".join(self.use.slots)
            + (f", mixed by: {self.use.mixer}" if self.use.mixer != "sum" else ""),
        }

    def trainable(self) -> Selector:
        return union(part.trainable for part in (*self.passes, *self.before, *self.then))

    def work(self) -> tuple[Work, ...]:
        passes = self.passes or tuple(one for stage in (*self.before, *self.then) for one in stage.passes)
        return tuple(work for one in passes for work in one.work)

    def server_init(self, site: ServerSite) -> Payload:
        shared = select(site.initial, self.share)
        backbone = ", ".join(sorted({info.backbone for info in site.clients}))
        start: dict[str, Scalar] = {"initial": start_of(self.layout, shared, backbone)} if shared else {}
        return self.route.initial(Payload(shared, start))

    def client_init(self, site: Site) -> Payload:
        return Payload()

    def uplink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {key: spec for key, spec in specs.items() if self.share(key)} if stage.uplink else {}

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {key: spec for key, spec in specs.items() if self.route.arrives(self.share)(key)}

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(self.route.dispatch(server, client).arrays)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        self.restore(client, received, site)
        if self.start is not None and received.arrays:
            site.model.load(rename(site.model.dump(slot(self.start[0])), self.start[1]))
        report = train(site, self.passes, at, moments=client.arrays, in_sequence=self.in_sequence)
        site.report.update(report.numbers())
        kept = {**client.arrays, **site.model.dump(self.kept), **report.moments}
        return Payload(kept, client.scalars), Payload(site.model.dump(self.share))

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        sent = updates[0].payload.arrays
        scale = self.layout.slot(slot_of(next(iter(sent)))).scale
        start = self.route.start(server, sent)
        context = MergeContext(start, at.seed, at.round, {update.client.id: scale for update in updates}, scale)
        merged = self.route.absorb(server, updates, lambda updates: self.merge(updates, context))
        return merged if self.after is None else Payload(self.after.step(server.arrays, merged.arrays), merged.scalars)

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        arrives = self.route.arrives(self.share)
        for name in self.use.slots:
            keys = [key for key in site.model.keys if slot_of(key) == name]
            known = client.arrays.keys() | received.arrays.keys()
            # A slot that only comes with downloads may still be at its start; one of the client's own may not.
            if not known.intersection(keys) and not all(map(arrives, keys)):
                raise NotTrained(
                    f"client {site.info.id} has no {name!r} adapter: it never completed the stage that "
                    "makes it, so there is nothing to deploy"
                )
        self.restore(client, received, site)
        return self.use.deployment(site)

    def __post_init__(self) -> None:
        for passes in (self.passes, *(stage.passes for stage in (*self.before, *self.then))):
            names = [one.name for one in passes]
            if len(set(names)) < len(names):
                raise ValueError(f"the passes of a stage need names of their own, got {', '.join(names)}")
        for rounds in (self.rounds, *(stage.rounds for stage in (*self.before, *self.then))):
            if rounds is not None and rounds < 1:
                raise ValueError(f"a stage needs at least one round, got {rounds}")

    @property
    def kept(self) -> Selector:
        """What a client trains and no download overwrites."""
        return union(one.trainable for one in self.passes) & ~self.route.arrives(self.share)

    def restore(self, client: Payload, received: Payload, site: Site) -> None:
        """Load what the client keeps, then what it received: the download wins where both have a key."""
        known = set(site.model.keys)
        site.model.load({key: tensor for key, tensor in client.arrays.items() if key in known})
        site.model.load(received.arrays)
