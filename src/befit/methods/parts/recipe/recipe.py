"""The composed method: orthogonal parts, each a small value, that together answer what a federated method is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, final

from befit.adapters.keys import NOTHING, Selector, need_selectors, select, slot, slot_of
from befit.adapters.layout import Layout
from befit.adapters.state import rename
from befit.core.errors import nothing_to_deploy
from befit.core.schema import plain
from befit.core.values import ClientInfo, Payload, Scalar, State, Tick, Update
from befit.merge.merge import Merge, MergeContext
from befit.merge.server_opt import AfterMerge
from befit.methods.parts.recipe.of_passes import described, lone, plain_slot, start_of, trained
from befit.methods.parts.recipe.route import Broadcast, Route
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Diagnostic, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, SharedStages, Stage, turn_of
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.passes import Pass


class Merging(Protocol):
    """How updates become one, as a value; `Merge` is one.

    individual  whether it needs every update by itself
    """

    @property
    def individual(self) -> bool: ...

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State: ...


class PersonalStage(Protocol):
    """A personal stage as a value; it can be run once it knows the recipe it belongs to. One that names slots beside
    those of its passes says so in `slots`, as terms do."""

    @property
    def rounds(self) -> int | None: ...

    @property
    def passes(self) -> tuple[Pass, ...]: ...

    def stage(self, recipe: Recipe) -> Stage: ...


@final
@dataclass(frozen=True)
class Recipe(Method):
    """A method as a value.

    layout  which slots exist, with what factors and rank
    passes  what is optimised in a federated round, in which order, with which guidance
    in_sequence  each pass goes over all batches of a round before the next one starts
    start   (from, into): a round starts with the values of one slot copied into another
    keep    (from, into, every): after every so many rounds a client keeps what it has in one slot in another too
    after   what the server does with what the merge made
    share   which arrays go up; nothing at all makes the method purely personal
    turns   of what is trained and shared, what moves in the first round, in the second and so on, from the first again
            after the last; empty: all of it in every round
    merge   how updates become one
    route   who gets what, and under which slot it arrives
    before  personal stages ahead of the federated one
    then    personal stages after it
    use     what is deployed
    rounds  rounds of the federated stage; None takes the configuration's
    diagnostics  how reports show what clients report
    """

    layout: Layout
    use: Use
    passes: tuple[Pass, ...] = ()
    share: Selector = NOTHING
    merge: Merging = field(default_factory=Merge)
    route: Route = field(default_factory=Broadcast)
    before: tuple[PersonalStage, ...] = ()
    then: tuple[PersonalStage, ...] = ()
    rounds: int | None = None
    in_sequence: bool = False
    start: tuple[str, str] | None = None
    keep: tuple[str, str, int] | None = None
    after: AfterMerge | None = None
    needs: Needs = field(default_factory=Needs)
    diagnostics: tuple[Diagnostic, ...] = ()
    turns: tuple[Selector, ...] = ()

    def plan(self) -> Sequence[Stage]:
        return self._stages

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        """Made once: a client's every request asks for the plan."""
        merge, alike = self.merge, isinstance(self.route, Broadcast)
        federated = Stage(
            "federate",
            _Federate(self),
            up=Message(self.share),
            down=self.download,
            rounds=self.rounds,
            trains=trained(self.passes),
            shared=self._shared(),
            reads=Gradients(len(self.passes), self.in_sequence),
            turns=self.turns,
            mean=merge.weights if alike and isinstance(merge, Merge) and not merge.individual else None,
            carries=self._carries(),
        )
        return (
            *(stage.stage(self) for stage in self.before),
            *([federated] if self.share != NOTHING else []),
            *(stage.stage(self) for stage in self.then),
        )

    def work(self) -> tuple[Work, ...]:
        passes = self.passes or tuple(step for stage in (*self.before, *self.then) for step in stage.passes)
        return tuple(work for step in passes for work in step.work)

    def server_init(self, site: ServerSite) -> Payload:
        shared = select(site.initial, self.route.holds(self.share))
        backbone = ", ".join(sorted({info.backbone for info in site.clients}))
        start: dict[str, Scalar] = {"initial": start_of(self.layout, shared, backbone)} if shared else {}
        return self.route.initial(Payload(shared, start))

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        arrives = self.route.arrives(self.share)
        for name in self.use.slots:
            keys = [key for key in site.model.keys if slot_of(key) == name]
            present = client.arrays.keys() | received.arrays.keys()
            # A slot that only comes with downloads may still be at its start; one of the client's own may not.
            if not present.intersection(keys) and not all(map(arrives, keys)):
                raise nothing_to_deploy(site.info.id, name)
        self.restore(client, received, site)
        return self.use.deployment(site)

    def __post_init__(self) -> None:
        need_selectors(share=self.share)
        if not any((self.passes, *(stage.passes for stage in (*self.before, *self.then)))):
            raise ValueError("passes: nothing is trained; give a pass, such as Pass(slot('shared'), ('shared',))")
        if self.share != NOTHING and self.merge.individual:
            object.__setattr__(self, "needs", replace(self.needs, individual_updates=True))
        for passes in (self.passes, *(stage.passes for stage in (*self.before, *self.then))):
            names = [step.name for step in passes]
            if len(set(names)) < len(names):
                raise ValueError(f"the passes of a stage need names of their own, got {', '.join(names)}")
        for rounds in (self.rounds, *(stage.rounds for stage in (*self.before, *self.then))):
            if rounds is not None and rounds < 1:
                raise ValueError(f"a stage needs at least one round, got {rounds}")
        for place, names in self._named():
            for name in names:
                try:
                    self.layout.slot(name)
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from None

    def _named(self) -> Iterator[tuple[str, Sequence[str]]]:
        """The slots that must hold an adapter, by the part of the recipe that names them."""
        yield "use", self.use.slots
        yield "start", self.start or ()
        yield "keep", self.keep[:2] if self.keep is not None else ()
        for stage in (self, *self.before, *self.then):
            yield from ((f"pass {step.name}", step.slots) for step in stage.passes)
        for stage in (*self.before, *self.then):
            yield type(stage).__name__, getattr(stage, "slots", ())

    def _shared(self) -> SharedStages | None:
        """The federated stage, where it averages one slot and leaves nothing at the clients: it is then the same in
        every recipe with such a slot, whatever comes before and after."""
        name = plain_slot(self.passes)
        if name is None or self.share != slot(name) or self.route != Broadcast() or self.start is not None:
            return None
        if self.passes[0].keep_optimiser or self.turns or self.keep is not None:
            return None
        server = {"merge": plain(self.merge), "after": plain(self.after), "rounds": self.rounds}
        block = {"name": "averaging", **described(self.layout.slot(name), self.passes), **server}
        return SharedStages(block, clients=())

    def _carries(self) -> bool:
        """Whether what is sent may depend on what a client kept: whether anything takes part in its training that some
        stage trains and the download does not overwrite."""
        if self.start is not None or self.keep is not None:
            return True
        slots = {slot.name for slot in self.layout.slots}  # a gate weighs them, and is none
        keys = self.layout.some_keys()
        everywhere = [step.reached for stage in (self, *self.before, *self.then) for step in stage.passes]
        for step in self.passes:
            beside = step.mixer != "sum"
            names = step.slots
            of_keys = ((key, slot_of(key)) for key in keys)
            involved = [key for key, name in of_keys if name in names or (beside and name not in slots)]
            trained_here = step.reached
            if not any(trained_here(key) and self.share(key) for key in involved):
                continue  # nothing of it is sent
            kept = (key for key in involved if not self.share(key) and any(reached(key) for reached in everywhere))
            if step.keep_optimiser or step.after is not None or any(kept):
                return True
        return False

    @property
    def download(self) -> Message:
        """What arrives at a client in every stage that sends anything."""
        route = self.route
        return Message(route.arrives(self.share), besides=route.once, fewer=route.fewer(self.share))

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        return Payload(self.route.dispatch(server, client).arrays)

    @staticmethod
    def restore(client: Payload, received: Payload, site: Site) -> None:
        """Load what the client keeps, then what it received: the download wins where both have a key."""
        keys = set(site.model.keys)
        site.model.load({key: tensor for key, tensor in client.arrays.items() if key in keys})
        site.model.load(received.arrays)


@dataclass(frozen=True)
class _Federate(Exchange):
    recipe: Recipe

    @property
    def lone(self) -> str:
        return lone(self.recipe.passes)

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        recipe = self.recipe
        recipe.restore(client, received, site)
        if recipe.start is not None and received.arrays:
            site.model.load(rename(site.model.dump(slot(recipe.start[0])), recipe.start[1]))
        passes, share = recipe.passes, recipe.share
        if recipe.turns:
            turn = turn_of(recipe.turns, at.round)
            passes = tuple(replace(pass_, trainable=pass_.trainable & turn) for pass_ in passes)
            share = share & turn
        report = yield from training(site, passes, at, memory=client, in_sequence=recipe.in_sequence)
        site.report.update(report.numbers())
        # What a client trains and no download overwrites is its own to keep.
        kept = site.model.dump(trained(recipe.passes) & ~recipe.download.arrays)
        kept |= select(received.arrays, recipe.route.once)
        if recipe.keep is not None and at.round % recipe.keep[2] == 0:
            kept |= rename(site.model.dump(slot(recipe.keep[0])), recipe.keep[1])
        return client | Payload(kept) | report.memory, Payload(site.model.dump(share))

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        recipe, sent = self.recipe, updates[0].payload.arrays
        scale = recipe.layout.slot(slot_of(next(iter(sent)))).scale
        start = recipe.route.start(server, sent)
        context = MergeContext(start, at.seed, at.round, {update.client.id: scale for update in updates}, scale)
        merged = recipe.route.absorb(server, updates, lambda updates: recipe.merge(updates, context))
        if recipe.after is None:
            return merged
        return Payload(recipe.after.step(server.arrays, merged.arrays), merged.scalars)
