"""FedLEASE (Wang et al. 2025): experts of clusters of clients, and a gate that takes from one to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from befit.adapters.gates import TopGate
from befit.adapters.keys import NOTHING, factor, select, slot, slot_of, to_slot
from befit.adapters.layout import GATE, Layout, Slot
from befit.adapters.state import rename
from befit.core.errors import NotTrained, PayloadMismatch
from befit.core.schema import at_least
from befit.core.values import ClientInfo, ClientWeights, Payload, State, Tick, Update
from befit.merge.merge import Merge
from befit.methods.parts.groups import clusters, cosine_distances, fitting
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Diagnostic, Method, Needs, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Personal, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.passes import Pass

SHARED = slot("shared")


@register("fedlease", title="FedLEASE", paper="arXiv:2509.15087", year=2025)
@dataclass(frozen=True)
class FedLease(Method):
    """Cluster clients by their own adapters; each trains its cluster's expert, and a gate over the experts of all.

    rank          rank of every expert
    alpha         their scaling: delta = alpha / rank * B A
    experts       how many clusters there are at most
    rounds_local  how many times train.max_steps a client trains an adapter alone before it is clustered
    weights       how the server averages in a cluster: "uniform" or "examples"

    `d_ij = mean over modules of 1 - cos(B_i, B_j)`; average linkage, n clusters of the best silhouette, 2 to `experts`.
    `E_c` starts as the mean of its clients' adapters. Then in every round a client of cluster c trains `E_c` and G:
    `y = W x + s sum_e w_e(x) B_e A_e x`, where of `softmax(G x)`, n rows for `E_c` and one for each other expert, the n
    largest count and add up to one; both are averaged in the cluster. A client that was away when clusters were found
    sends its adapter instead and gets the cluster whose first mean is nearest; a newcomer has the expert of the least
    loss on its training examples.
    Alone nothing travels; then r(d_in + d_out) per module up, once. In a round up r(d_in + d_out) and the gate,
    (2 experts - 1) d_in, per module; down as much, and n - 1 experts more: with one expert up = down.
    The gate depends on the input, so the deployed model cannot be one PEFT adapter.

    Source: Wang et al. 2025, Algorithm 1; lei-wang-link/FedLEASE, utils.py and server.py; lei-wang-link/FedLEASE,
    peft/tuners/lora.py; docs/methods/fedlease.md.
    """

    rank: int = 8
    alpha: float = 16.0
    experts: Annotated[int, at_least(1)] = 4
    rounds_local: Annotated[int, at_least(1)] = 5
    weights: ClientWeights = "uniform"
    layout: Layout = field(init=False)
    use: Use = field(init=False)

    needs = Needs(individual_updates=True)
    diagnostics = (Diagnostic("number", ("group",), "group is the cluster whose expert a client trains, from 0."),)

    def __post_init__(self) -> None:
        slots = ("shared", *(f"other-{number}" for number in range(1, self.experts)))
        adapters = tuple(Slot(name, self.rank, self.alpha) for name in slots)
        layout = Layout(adapters, slots, gate=TopGate())
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "use", Use(slots, "gate"))

    def plan(self) -> Sequence[Stage]:
        trained, gated = slot("shared", GATE), slot(*self.use.slots, GATE)
        return [
            Stage("local", _Local(), rounds=self.rounds_local, trains=SHARED, reads=Gradients()),
            Stage("cluster", _Cluster(self), up=Message(SHARED), rounds=1, trains=NOTHING, reads=Gradients(0)),
            Stage(
                "federate",
                _Federate(self),
                up=Message(trained),
                # As many experts as there are clusters, none while there are none; no gate for one without its own.
                down=Message(gated, ("group",), fewer=gated),
                trains=trained,
                reads=Gradients(),
            ),
        ]

    def work(self) -> tuple[Work, ...]:
        return (Work(self.use.slots, slot("shared", GATE)),)

    def server_init(self, site: ServerSite) -> Payload:
        return Payload()

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        """The experts with the gate; without a gate, or where there is nothing to weigh, the one of the least loss; and
        before there are any, its own."""
        if not received.arrays:
            return Deployment(_own(client, site), ("shared",))
        experts = _experts(received)
        if "group" in received.scalars and len(experts) > 1:
            return Deployment(received.arrays, self.use.slots[: len(experts)], "gate", own="shared")
        return Deployment(experts[fitting(site, experts, 0)], ("shared",))


@dataclass(frozen=True)
class _Local(Personal):
    """Train an adapter alone."""

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        site.model.load(client.arrays)
        report = yield from training(site, [Pass(SHARED, ("shared",))], at)
        site.report.update(report.numbers())
        return Payload(site.model.dump(SHARED)), Payload()


@dataclass(frozen=True)
class _Cluster(Exchange):
    """Clients send these adapters, once, and the experts start from the means of clusters."""

    method: FedLease

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        site.model.load(_own(client, site))
        return client, Payload(site.model.dump(SHARED))  # kept until it has a cluster: the reply may be lost

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return _clustered(self.method, updates, site)


@dataclass(frozen=True)
class _Federate(Exchange):
    """A client trains its cluster's expert beside the others', and the gate of its cluster.

    One without a cluster sends the adapter that it trained alone, by which it gets one.
    """

    method: FedLease

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """The client's own expert in the first slot, and the gate; all experts in their order for one without a
        cluster."""
        own_group = int(server.part("groups").number(client.id, -1))
        order = sorted(range(int(server.number("experts", 0))), key=lambda group: group != own_group)
        arrays: State = {}
        for name, group in zip(self.method.use.slots, order, strict=False):
            arrays |= rename(select(server.arrays, slot(_expert(group))), name)
        if own_group < 0:
            return Payload(arrays)
        return Payload(arrays | rename(select(server.arrays, slot(_gate(own_group))), GATE), {"group": own_group})

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        chosen = slot("shared", GATE)
        if "group" not in received.scalars:
            site.model.load(_own(client, site))
            return client, Payload(site.model.dump(chosen))
        site.model.load(received.arrays)
        active = self.method.use.slots[: len(_experts(received))]
        report = yield from training(site, [Pass(chosen, active, mixer="gate")], at)
        site.report.update({**report.numbers(), "group": received.number("group")})
        return Payload(), Payload(site.model.dump(chosen))

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        if not server.number("experts", 0):  # nobody replied when clusters were found: these come with own adapters
            return _clustered(self.method, updates, site)
        arrays, merge, known = dict(server.arrays), Merge(self.method.weights), server.part("groups")
        for group in range(int(server.number("experts"))):
            if of_group := [update for update in updates if known.number(update.client.id, -1) == group]:
                mean = merge(of_group)
                arrays |= rename(select(mean, SHARED), _expert(group)) | rename(select(mean, slot(GATE)), _gate(group))
        late = [update for update in updates if update.client.id not in known.scalars]
        groups = known | Payload({}, {update.client.id: self._nearest(server, update) for update in late})
        return Payload(arrays, server.scalars).with_part("groups", groups)

    @staticmethod
    def _nearest(server: Payload, update: Update) -> int:
        """The cluster whose first mean has the nearest B."""
        own = select(update.payload.arrays, SHARED & factor("B"))
        experts = range(int(server.number("experts")))
        means = [rename(select(server.arrays, slot(_first(group))), "shared") for group in experts]
        return int(cosine_distances([own, *means])[0, 1:].argmin())


def _clustered(method: FedLease, updates: Sequence[Update], site: ServerSite) -> Payload:
    """The server's memory with an expert for each cluster of adapters that clients trained alone: their mean."""
    directions = [select(update.payload.arrays, SHARED & factor("B")) for update in updates]
    clustered = clusters(cosine_distances(directions), method.experts)
    merge, arrays, groups = Merge(method.weights), dict[str, Tensor](), Payload()
    for group, indices in enumerate(clustered):
        mean = select(merge([updates[index] for index in indices]), SHARED)
        arrays |= rename(mean, _expert(group)) | rename(select(site.initial, slot(GATE)), _gate(group))
        arrays |= rename(select(mean, factor("B")), _first(group))
        groups |= Payload({}, {updates[index].client.id: group for index in indices})
    return Payload(arrays, {"experts": len(clustered)}).with_part("groups", groups)


def _own(client: Payload, site: Site) -> State:
    """The adapter that the client trained alone. Raises NotTrained without one: the initial adapter is as far from
    every cluster as from any other."""
    if not client.arrays:
        raise NotTrained(
            f"client {site.info.id} has no adapter to be clustered by: it was away in all rounds of the stage 'local'"
        )
    return client.arrays


def _expert(group: int) -> str:
    return f"expert-{group}"


def _first(group: int) -> str:
    """The mean of the cluster's B when it was found."""
    return f"first-{group}"


def _gate(group: int) -> str:
    return f"gate-{group}"


def _experts(received: Payload) -> list[State]:
    """What came in slots of experts, in the order of the slots, under the keys of the first. Raises PayloadMismatch
    where the first is missing: a cluster always has one."""
    experts: dict[str, State] = {}
    for key, value in received.arrays.items():
        if slot_of(key) != GATE:
            experts.setdefault(slot_of(key), {})[to_slot(key, "shared")] = value
    if "shared" not in experts:
        raise PayloadMismatch("a download of FedLease has no expert of the client's own cluster")
    return [experts["shared"], *(experts[f"other-{number}"] for number in range(1, len(experts)))]
