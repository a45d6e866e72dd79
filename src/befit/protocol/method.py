"""The contract between methods and engines: both halves of a federated protocol, as one value.

A method is frozen: what changes in a run is the server's memory and each client's memory, which the verbs take and
return. Both memories are `Payload`s (arrays and plain numbers), so that they can be stored without pickle.

A method in full, federated averaging of one adapter without any recipe:

    class Average(Method):
        layout = lora(rank=8, alpha=16)

        def plan(self):
            return [Stage("federate", self)]

        def server_init(self, site):
            return Payload(select(site.initial, slot("shared")))

        def client_init(self, site):
            return Payload()

        def uplink(self, stage, specs):
            return specs

        def dispatch(self, server, client, at):
            return server

        def client_update(self, client, received, site, at):
            site.model.load(received.arrays)
            train(site, [Pass(slot("shared"), ("shared",))], at)
            return client, Payload(site.model.dump(slot("shared")))

        def aggregate(self, server, updates, site, at):
            return Payload(weighted_mean((u.payload.arrays for u in updates), [u.client.num_examples for u in updates]))

        def deploy(self, client, received, site):
            return Deployment(received.arrays, ("shared",))
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from befit.adapters.keys import EVERYTHING, Selector
from befit.adapters.layout import Layout, ModelShapes
from befit.adapters.mixers import Mix
from befit.core.values import Payload, State
from befit.protocol.stage import Exchange, Stage
from befit.protocol.work import PublicWork, Work

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings
    from befit.protocol.site import ServerSite, Site

__all__ = ["Deployment", "Method", "Needs", "Opening"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method demands of a federation.

    min_clients         fewer are refused before a run starts
    splits              splits in which every client needs examples; an empty one is refused before a run starts
    individual_updates  the server has to see each client's update, so a masked sum will not do
    mixed               it serves clients of different backbones itself; otherwise each family is served by itself
    public              it needs the federation's public records, at the server and at the clients
    public_mixed        it needs them where clients have different backbones
    server_model        the server runs the backbones, on public records
    named               patterns of ids in the method's options, each of which has to fit some client or newcomer
    """

    min_clients: int = 1
    splits: tuple[str, ...] = ("train",)
    individual_updates: bool = False
    mixed: bool = False
    public: bool = False
    public_mixed: bool = False
    server_model: bool = False
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deployment:
    """The model a client would use now: values of the active slots, and how they are put together.

    others  what it could use in its place, such as one adapter for each of several budgets, by a name that a metric can
            end with; the model itself may be among them
    about   arrays that take no part in the model and say how it came about, such as learnt scales; for the client's
            folder and the report, they do not travel
    """

    arrays: State
    slots: tuple[str, ...]
    mixer: Mix = "sum"
    others: Mapping[str, Deployment] = field(default_factory=dict[str, "Deployment"])
    about: State = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Opening:
    """The first stages of a plan, where another method decides what they do: runs that share them need do them once.

    block     configuration of that other method, with its defaults
    stages    how many stages of the plan
    own       of a memory, at the server or a client, what these stages neither read nor write
    settings  what those stages have otherwise than the run, by block of the configuration
    """

    block: Mapping[str, Any]
    stages: int
    own: Callable[[Payload], Payload]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Method(Exchange):
    """An exchange with a plan, initial memories and a layout. See the module's docstring for a worked example.

    mixer  how what it deploys puts its slots together, known before a run: see `Deployment`
    """

    needs: Needs = Needs()
    mixer: Mix = "sum"
    layout: Layout

    @abstractmethod
    def plan(self) -> Sequence[Stage]:
        """The stages of a run, in order."""

    def opening(self) -> Opening | None:
        """What the plan begins with, if that is another method's."""
        return None

    def arrival(self) -> Stage | None:
        """What a newcomer, a client that takes no part in any round, does once before its first download.

        Its exchange's `aggregate` gives what the server holds for this newcomer alone, and must leave the run's own
        memory as it is. Without one a newcomer gets what any client would that has not sent anything.
        """
        return None

    def describe(self) -> dict[str, object]:
        """Stages and what travels in each, in words, for `befit explain`."""
        return {"stages": [f"{stage.name} ({'federated' if stage.uplink else 'personal'})" for stage in self.plan()]}

    def trainable(self) -> Selector:
        """Everything that a client may train in some stage."""
        return EVERYTHING

    def remarks(self, budget: TrainSettings) -> list[str]:
        """What a user should know of this method together with these settings of local training, before a run."""
        return []

    def faults(self, shapes: ModelShapes, clients: Sequence[str]) -> list[str]:
        """What its options ask of these clients that a model of these shapes cannot give; refused before a run."""
        return []

    def mismatches(self, families: Mapping[str, ModelShapes]) -> list[str]:
        """What it needs the models of all families of clients, by name, to have in common and they have not; refused
        before a run."""
        return []

    def work(self) -> tuple[Work, ...]:
        """What a client computes in a step of local training, for estimates; nothing where a method does not say."""
        return ()

    def public_work(self) -> PublicWork:
        """What a round computes on public records, at clients and at the server, for estimates."""
        return PublicWork()

    @abstractmethod
    def server_init(self, site: ServerSite) -> Payload: ...

    @abstractmethod
    def client_init(self, site: Site) -> Payload:
        """A client's memory on first contact."""

    @abstractmethod
    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        """What the client would use if the run ended now, given the current download. Changes no stored memory."""
