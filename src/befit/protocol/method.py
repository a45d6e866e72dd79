"""The contract between methods and engines: both halves of a federated protocol, as one value.

A method is frozen: what changes in a run is the server's memory and each client's memory, which exchanges take and
return. Both memories are `Payload`s (arrays and plain numbers), so that they can be stored without pickle.

A method in full, federated averaging of one adapter without any recipe:

    class Average(Method):
        layout = lora(rank=8, alpha=16)
        use = Use(("shared",))

        def plan(self):
            adapter = Message(slot("shared"))
            return [Stage("federate", Averaging(), up=adapter, down=adapter)]

        def server_init(self, site):
            return Payload(select(site.initial, slot("shared")))

        def deploy(self, client, received, site):
            return Deployment(received.arrays, ("shared",))


    class Averaging(Exchange):
        def dispatch(self, server, client, at):
            return server

        def client_update(self, client, received, site, at):
            site.model.load(received.arrays)
            yield from training(site, [Pass(slot("shared"), ("shared",))], at)
            return client, Payload(site.model.dump(slot("shared")))

        def aggregate(self, server, updates, site, at):
            return Payload(weighted_mean((u.payload.arrays for u in updates), [u.client.num_examples for u in updates]))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor

from befit.adapters.forms import LORA
from befit.adapters.keys import EVERYTHING, NOTHING, Selector, join, slot, slot_of, union
from befit.adapters.layout import GATE, REFERENCES, Layout, ModelShapes
from befit.adapters.mixers import Mix, check_mix
from befit.adapters.pq import BASIS
from befit.adapters.whole_model import Whole
from befit.core.names import several
from befit.core.plugins import not_returned, origin
from befit.core.values import Payload, State
from befit.protocol.stage import Exchange, SharedStages, Stage
from befit.protocol.work import PublicWork, Work

if TYPE_CHECKING:
    from befit.protocol.context import Context, Problem
    from befit.protocol.site import ServerSite, Site


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method demands of a federation.

    min_clients         fewer are refused before a run starts
    splits              splits in which every client needs examples; an empty one is refused before a run starts
    individual_updates  the server has to see each client's update, so a masked sum will not do
    mixed               it serves clients of different backbones itself; otherwise each family is served by itself
    public              it needs the federation's public records at the server
    public_at_clients   its clients need them too
    public_mixed        it needs them where clients have different backbones
    server_model        the server runs the backbones, on public records
    common_model        clients run the model that all have too: `common_model`, or the smallest backbone
    """

    min_clients: int = 1
    splits: tuple[str, ...] = ("train",)
    individual_updates: bool = False
    mixed: bool = False
    public: bool = False
    public_at_clients: bool = False
    public_mixed: bool = False
    server_model: bool = False
    common_model: bool = False


@dataclass(frozen=True)
class Deployment:
    """The model a client would use now: values of the active slots, and how they are put together.

    others  what it could use in its place, such as one adapter for each of several budgets, by a name that a metric can
            end with; the model itself may be among them
    about   arrays that take no part in the model and say how it came about, such as learnt scales; for the client's
            folder and the report, they do not travel
    own     the active slot that is exported alone where the mix cannot be one adapter; empty: the last
    """

    arrays: State
    slots: tuple[str, ...]
    mixer: Mix = "sum"
    others: Mapping[str, Deployment] = field(default_factory=dict[str, "Deployment"])
    about: State = field(default_factory=dict[str, Tensor])
    own: str = ""


@dataclass(frozen=True)
class Use:
    """What a client deploys, known before a run: the active slots, and how they are mixed."""

    slots: tuple[str, ...]
    mixer: Mix = "sum"

    def __post_init__(self) -> None:
        several(slots=self.slots)
        check_mix(self.mixer)

    def deployment(self, site: Site) -> Deployment:
        """The slots with the values that the model holds now, and with the gate or the basis where there is one."""
        arrays = site.model.dump(slot(*self.slots, BASIS, GATE, slot_of(REFERENCES)))
        return Deployment(arrays, self.slots, self.mixer)

    def __str__(self) -> str:
        return " + ".join(self.slots) + (f", mixed by: {self.mixer}" if self.mixer != "sum" else "")


@dataclass(frozen=True)
class Diagnostic:
    """How reports show numbers that clients give in `site.report`; plain data, kept in results.json.

    kind   "share": one number in [0, 1], or a range of two, as a column and a plot
           "weights": what `Method.influence` says, as a map of clients and clients
           "choice": which of several things a client kept: 1 for one of the numbers, 0 for the others
           "number": any number, which a comparison shows beside the others
           "alarm": a sentence at the head of the report, about the clients whose number is at most `limit`
    keys   names of the numbers: of a range its two ends; of a choice what the names begin with; of weights none
    text   what the numbers say; {choices} and {kept} of a choice, {clients} of an alarm are filled in
    title  of the plot
    """

    kind: Literal["share", "choice", "number", "alarm", "weights"]
    keys: tuple[str, ...]
    text: str
    title: str = ""
    limit: float = 0.0


class Method(ABC):
    """A plan, initial memories and a layout. See the module's docstring for a worked example.

    use          what it deploys, see `Deployment`
    diagnostics  how reports show what its clients report; everything else is in a table of all diagnostics
    """

    needs: Needs = Needs()
    diagnostics: tuple[Diagnostic, ...] = ()
    layout: Layout
    use: Use

    @abstractmethod
    def plan(self) -> Sequence[Stage]:
        """The stages of a run, in order; what a newcomer does first is a stage among them."""

    def check(self, context: Context) -> list[Problem]:
        """What its options ask for and these clients, data or models cannot give, and what a user should know."""
        return []

    def work(self) -> tuple[Work, ...]:
        """What a client computes in a step of local training, for estimates; nothing where a method does not say."""
        return ()

    def public_work(self) -> PublicWork:
        """What a round computes on public records, at clients and at the server, for estimates."""
        return PublicWork()

    def opening_bytes(self, shapes: Mapping[str, ModelShapes], tokens: int) -> int:
        """Memory that `server_init` takes beside the backbones, for estimates.

        shapes  of each family's model
        tokens  of a public record, at most
        """
        return 0

    @abstractmethod
    def server_init(self, site: ServerSite) -> Payload: ...

    def client_init(self, site: Site) -> Payload:
        """A client's memory on first contact."""
        return Payload()

    def influence(self, server: Payload) -> Mapping[str, Mapping[str, float]]:
        """By client, how much each client counts in what it is sent next, as the server knows it after a round.

        Nothing where a method does not say, or sends the same to everybody.
        """
        return {}

    @abstractmethod
    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        """What the client would use if the run ended now, given the current download. Changes no stored memory."""

    @final
    def starting(self) -> list[str]:
        """The slots that an adapter from elsewhere can be the start of: the first low-rank one, and those like it that
        never take part beside one that starts so. What is merged later has one start, and what adds up has the adapter
        once. None where no stage trains any of them."""
        slots, found = [slot for slot in self.layout.slots if slot.form is LORA], list[str]()
        together = [set(self.use.slots), *(set(work.active) for work in self.work())]
        for each in slots:
            beside = any(each.name in names and not names.isdisjoint(found) for names in together)
            if replace(each, name=slots[0].name) == slots[0] and not beside:
                found.append(each.name)
        trained = self.trainable()
        return found if any(trained(join(name, "", "B")) for name in found) else []

    @final
    def trainable(self) -> Selector:
        """Everything that a client may train in some stage."""
        chosen = [stage.trains for stage in self.plan() if stage.trains is not None]
        return union(dict.fromkeys(trained for trained in chosen if trained != NOTHING)) if chosen else EVERYTHING


@dataclass(frozen=True)
class Wrapped(Method):
    """A method that is another one, but for its stages and what else a subclass says."""

    method: Method

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.method.needs

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.method.layout

    @property
    def use(self) -> Use:  # type: ignore[override]
        return self.method.use

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:  # type: ignore[override]
        return self.method.diagnostics

    def check(self, context: Context) -> list[Problem]:
        return self.method.check(context)

    def work(self) -> tuple[Work, ...]:
        return self.method.work()

    def public_work(self) -> PublicWork:
        return self.method.public_work()

    def opening_bytes(self, shapes: Mapping[str, ModelShapes], tokens: int) -> int:
        return self.method.opening_bytes(shapes, tokens)

    def server_init(self, site: ServerSite) -> Payload:
        return self.method.server_init(site)

    def client_init(self, site: Site) -> Payload:
        return self.method.client_init(site)

    def influence(self, server: Payload) -> Mapping[str, Mapping[str, float]]:
        return self.method.influence(server)

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return self.method.deploy(client, received, site)


def malformed(method: Method) -> str:
    """What is wrong with the types of what a method says of itself; empty where nothing is."""
    kind, where = type(method).__name__, origin(type(method))
    for name, wanted in (("layout", Layout), ("use", Use)):
        if not isinstance(getattr(method, name, None), wanted):
            return f"{kind} of {where} has no `{name}` that is a {wanted.__name__}"
    stages: Any = method.plan()
    if wrong := not_returned(method.plan, stages, Sequence):
        return wrong
    if not stages:
        return f"{kind}.plan of {where} returns no stage"
    for stage in stages:
        if not isinstance(stage, Stage):
            return f"{kind}.plan of {where} has a {type(stage).__name__} among its stages"
        exchange: Any = stage.exchange
        if not isinstance(exchange, Exchange):
            return f"stage {stage.name} of {kind} ({where}) has an exchange that is no Exchange: {exchange!r}"
    names = [stage.name for stage in stages]
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f"{kind}.plan of {where} has two stages of the name {twice!r}"


def run_stages(method: Method) -> list[Stage]:
    """The stages of a run, without what newcomers do."""
    return [stage for stage in method.plan() if stage.who == "cohort"]


def newcomer_stage(method: Method) -> Stage | None:
    """What a newcomer does once before its first download. None: it downloads what a client gets in its first round."""
    return next((stage for stage in method.plan() if stage.who == "newcomer"), None)


def federated_stage(stages: Sequence[Stage]) -> Stage | None:
    """The last stage in which something leaves the clients: what its server dispatches is what clients deploy from."""
    return next((stage for stage in reversed(stages) if stage.federated), None)


def trained_alone(method: Method) -> bool:
    """Whether nothing leaves the clients in any stage, so that each has its own examples alone to learn from."""
    return federated_stage(run_stages(method)) is None


def shared_stages_of(method: Method) -> dict[int, SharedStages]:
    """The stages that other plans may have too, by the number in the plan of the last of each."""
    return {number: stage.shared for number, stage in enumerate(run_stages(method)) if stage.shared is not None}


def trains_in_fleets(method: Method) -> str:
    """Why clients cannot train as one in any stage; empty where they can, see docs/fleets.md."""
    reasons: list[str] = []
    for stage in method.plan():
        if (stage.trains is not None and stage.trains == NOTHING) or stage.who == "newcomer":
            continue
        if not stage.exchange.asks:
            reasons.append(f"stage {stage.name} trains within its update, and asks for nothing")
            continue
        whole = [slot.name for slot in method.layout.slots if isinstance(slot.form, Whole)]
        if not whole and not stage.exchange.lone:
            return ""
        reasons.append(f"slot {whole[0]} changes the backbone's own weights" if whole else stage.exchange.lone)
    return reasons[0] if reasons else "it trains nothing"
