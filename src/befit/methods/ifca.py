"""IFCA (Ghosh et al. 2020): several adapters, of which each client trains the one that fits its own data best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from befit.adapters.keys import join, select, slot, slot_of, to_slot
from befit.adapters.layout import Layout, Numbers, initial_values, lora
from befit.adapters.state import fingerprint, rename, specs_of
from befit.core.schema import at_least
from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, ClientWeights, Payload, State, Tick, Update
from befit.merge.merge import Merge
from befit.methods.parts.groups import fitting
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Diagnostic, Method, Needs, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Message, Specs, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.passes import Pass

CHOICE = "choice"
GROUP = join(CHOICE, "all", "group")  # (groups,), 1 for a client's own and 0 for the others


@register("ifca", title="IFCA", paper="arXiv:2006.04088", year=2020)
@dataclass(frozen=True)
class Ifca(Method):
    """Send all groups' adapters to every client; it trains the one of the least loss, which averages with its group's.

    rank     rank of the adapters
    alpha    their scaling: delta = alpha / rank * B A
    groups   j, how many adapters there are
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `j_k = argmin_j L_k(theta_j)` on the client's training examples, `theta_j <- sum_{k: j_k = j} p_k theta_k`; a group
    that nobody chose stays. Where all are equal, as at the start, a draw decides. A newcomer chooses alike.
    up = r(d_in + d_out) per module, down = groups times that; with one group up = down. Beside the training, a round
    takes one forward pass over the client's training examples for every group.

    Source: Ghosh et al. 2020, Algorithm 1, option II; jichan3751/ifca, mnist/train_cluster_mnist.py;
    docs/methods/ifca.md.
    """

    rank: int = 8
    alpha: float = 16.0
    groups: Annotated[int, at_least(1)] = 2
    weights: ClientWeights = "examples"
    layout: Layout = field(init=False)

    use = Use(("shared",))
    needs = Needs(individual_updates=True)
    diagnostics = (Diagnostic("number", ("group",), "group is the one whose adapter a client trained, from 0."),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", replace(lora(self.rank, self.alpha), extras=(Numbers(GROUP, self.groups),)))

    def plan(self) -> Sequence[Stage]:
        shared = slot("shared")
        up = Message(slot("shared", CHOICE))
        down = Message(shared, become=self._each, text=f"{shared} of every group")
        return [Stage("federate", _Federate(self), up=up, down=down, trains=shared, reads="the losses of all clusters")]

    def _each(self, shared: Specs) -> Specs:
        return {to_slot(key, _name(group)): spec for group in range(self.groups) for key, spec in shared.items()}

    def work(self) -> tuple[Work, ...]:
        return (Work(("shared",), slot("shared")),)

    def server_init(self, site: ServerSite) -> Payload:
        """Every group starts with an A of its own; the first with that of the common seed."""
        shared = select(site.initial, slot("shared"))
        arrays = rename(shared, _name(0))
        for group in range(1, self.groups):
            seed = derive_seed(0, "group", str(group), fingerprint(shared))
            arrays |= rename(initial_values(specs_of(shared), seed), _name(group))
        return Payload(arrays)

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        groups = _groups(received)
        return Deployment(groups[fitting(site, groups, int(client.number("group", 0)))], self.use.slots)


@dataclass(frozen=True)
class _Federate(Exchange):
    method: Ifca

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(server.arrays)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        groups = _groups(received)
        drawn = at.seed_for(site.info.id, "group") % len(groups)
        chosen = fitting(site, groups, drawn)
        site.model.load(groups[chosen])
        report = yield from training(site, [Pass(slot("shared"), ("shared",))], at)
        site.report.update({**report.numbers(), "group": float(chosen)})
        one_hot = torch.eye(len(groups))[chosen]
        reply = {**site.model.dump(slot("shared")), GROUP: one_hot}
        return Payload({}, {"group": chosen}), Payload(reply)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        members: dict[int, list[Update]] = {}
        for update in updates:
            arrays = update.payload.arrays
            group = int(arrays[GROUP].argmax())
            members.setdefault(group, []).append(replace(update, payload=Payload(select(arrays, slot("shared")))))
        merge, arrays = Merge(self.method.weights), dict(server.arrays)
        for group, of_group in sorted(members.items()):
            arrays |= rename(merge(of_group), _name(group))
        return Payload(arrays)


def _name(group: int) -> str:
    return f"group-{group}"


def _groups(received: Payload) -> list[State]:
    """The adapters of all groups, in their order, under the keys of the slot."""
    groups: dict[str, State] = {}
    for key, value in received.arrays.items():
        groups.setdefault(slot_of(key), {})[to_slot(key, "shared")] = value
    return [groups[_name(group)] for group in range(len(groups))]
