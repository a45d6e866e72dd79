"""FedL2P (Lee et al. 2023) on LoRA: the federation learns to say which learning rates a client should use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import NOTHING, select, slot
from befit.adapters.layout import Layout, Numbers, Slot
from befit.adapters.state import weighted_mean
from befit.core.schema import OPEN_SHARE, POSITIVE, Mark, at_least
from befit.core.values import ClientInfo, ClientWeights, Payload, Tick, Update
from befit.merge.clients import counts_of
from befit.methods.parts.budget.base import MethodBlock, base_slots, load_base, with_base
from befit.methods.parts.budget.meta import MetaStep, improve, in_two, rated_optimiser, train_at
from befit.methods.parts.budget.personal import steps_for
from befit.methods.parts.budget.rates import RATES, VALIDATION, RateNet, rate_multiples
from befit.methods.parts.budget.stages import OnBase, features_of, made_before, resume, updated_memory
from befit.protocol.context import Context, Problem
from befit.protocol.method import Method, Needs
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Message, Personal, Stage
from befit.protocol.work import Work
from befit.train.optim import MOMENTS, dump_moments, learning_rate, load_moments

_BEST = "best"
_LOSS = f"{VALIDATION}/all/loss"
_MULTIPLES = "multiples/all/rate"


@register("fedl2p", title="FedL2P", paper="arXiv:2310.02420", year=2023)
@dataclass(frozen=True)
class FedL2P(OnBase):
    """Federate a network that predicts a learning rate for each A and B; each client then trains LoRA at its own.

    rank          r of the budget: r ranks in each of L target modules; the network is for this r alone
    base          the method whose result is personalised: {name: fedit, rounds: 100, train: {lr: 5e-5}}; null: none
    scale         s of delta = s B A; alpha is s r
    epochs        passes over the training examples, in each training of a round and at the end; null: train.max_steps
    validation    share of a client's training examples that only hypergradients see
    outer         times that a client trains and improves the network in a round
    draws         pairs of a training and a validation example in each of them
    terms         of the Neumann series
    psi           its step
    lr_net        Adam's rate for the network
    lr_eta        Adam's rate for eta, in units of train.lr
    patience      rounds without a lower validation loss after which nobody trains any more; null: all rounds
    mask_padding  leave padding out of the features, which makes them independent of batches
    weights       how the server averages: "examples" (the paper) or "uniform"
    preset        "parity" does what the released code does where it differs

    Tensor o learns at `train.lr net(f)_o eta_o`; up = down = 200 M + 102 O + 10200 for M linear modules and O tensors
    (2 L, and the task head's); one number more up. A round: `outer` times AdamW from the start, then a step of Adam on
    `- sum_o <(H p)_o, u_o> d rate_o`, `p = sum_{j<=terms} (I - psi H)^j grad L_V`, u the last update's direction.

    Source: Lee et al. 2023, hypergradient by the implicit function theorem; SamsungLabs/fedp2eft,
    src/apps/clients/fedl2p_trainers.py; docs/methods/fedl2p.md.
    """

    rank: int = 8
    base: MethodBlock = None
    scale: float = 2.0
    epochs: Annotated[int | None, Mark.PASSES] = None
    validation: Annotated[float, Mark.HELD_OUT, OPEN_SHARE] = 0.2
    outer: Annotated[int, Mark.LOOP, POSITIVE] = 3
    draws: Annotated[int, Mark.LOOP, Mark.DRAWN, POSITIVE] = 16
    terms: Annotated[int, Mark.LOOP, at_least(0)] = 3
    psi: Annotated[float, POSITIVE] = 0.1
    lr_net: Annotated[float, POSITIVE] = 1e-4
    lr_eta: Annotated[float, POSITIVE] = 1e-2
    patience: Annotated[int | None, POSITIVE] = 50
    mask_padding: bool = False
    weights: ClientWeights = "examples"
    preset: Literal["recommended", "parity"] = "recommended"
    layout: Layout = field(init=False)
    before: Method | None = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        adapter = Slot(BUDGETED, self.rank, self.scale * self.rank)
        self.prepare(Layout((adapter,), extras=(RateNet(), Numbers(_LOSS))), self.base, "fedl2p")

    def own_stages(self) -> list[Stage]:
        net = slot(RATES)
        up, down = Message(slot(RATES, VALIDATION)), Message(net, numbers=("stopped",))
        predict = _Predict(self.validation, self.mask_padding, self.all_padding)
        alone, rounds = _AtOwnRates(self.epochs, self.validation), None if self.epochs is None else 1
        mean = "uniform" if self.weights == "uniform" else None  # losses are never weighed
        return [
            Stage("meta", _Meta(self), up, down, lasts=False, trains=net, mean=mean, reads="hypergradients of rates"),
            Stage("rates", predict, None, Message(net), rounds=1, trains=NOTHING),
            Stage("budget", alone, rounds=rounds, trains=slot(BUDGETED)),
        ]

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED,), slot(BUDGETED), float(self.outer)),)

    def check(self, context: Context) -> list[Problem]:
        without = "has no effect on FedL2P's own stages, which give every A and B a rate of its own, by AdamW"
        train, found = context.train, super().check(context)
        if train.loraplus_ratio != 1:
            found.append(Problem("warning", "train.loraplus_ratio", without))
        if train.optimiser != "adamw":
            found.append(Problem("warning", "train.optimiser", without))
        if context.streams:
            apart = (
                "FedL2P holds a part of all training examples out, so they have to be there from the start; set none"
            )
            found.append(Problem("error", "stream.kind", apart))
        return found

    def server_init(self, site: ServerSite) -> Payload:
        net = Payload(select(site.initial, slot(RATES)))
        base = None if self.before is None else self.before.server_init(site)
        return with_base((net | Payload({}, {"stale": 0})).with_part(_BEST, _copied(net)), base)

    @property
    def all_padding(self) -> bool:
        return self.preset == "parity" and not self.mask_padding


def _copied(net: Payload) -> Payload:
    """A memory that is written to a file must not hold one tensor twice."""
    return Payload({key: value.clone() for key, value in net.arrays.items()})


@dataclass(frozen=True)
class _Meta(Exchange):
    """Each client trains at the network's rates and improves the network."""

    method: FedL2P

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(select(server.arrays, slot(RATES)), {"stopped": self._stopped(server)})

    def _stopped(self, server: Payload) -> bool:
        patience = self.method.patience
        return patience is not None and server.number("stale") >= patience

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        network, how = select(received.arrays, slot(RATES)), self.method
        if received.scalars["stopped"]:
            return client, Payload({**network, _LOSS: torch.zeros(1)})
        load_base(client, site)
        parts = in_two(site, how.validation, at.seed)
        seen, features = features_of(client, parts, how.mask_padding, how.all_padding)
        step = MetaStep(how.outer, how.draws, how.terms, how.psi, how.lr_net, how.lr_eta, how.preset == "parity")
        steps = steps_for(parts, how.epochs)
        net, loss = improve(parts, at, network, seen, step, steps, base_slots(client))
        site.report.update({"steps": float(steps * how.outer), "loss": loss})
        return client | Payload(features), Payload({**net, _LOSS: torch.tensor([loss])})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """The average; beside it the one of the round whose clients had the lowest mean validation loss."""
        if self._stopped(server):
            return server
        weights = counts_of(updates, self.method.weights)
        nets = (select(update.payload.arrays, slot(RATES)) for update in updates)
        mean = Payload(weighted_mean(nets, weights))
        loss = sum(float(update.payload.arrays[_LOSS]) for update in updates) / len(updates)
        if "lowest" not in server.scalars or loss < server.number("lowest"):
            return (server | mean | Payload({}, {"stale": 0, "lowest": loss})).with_part(_BEST, _copied(mean))
        return server | mean | Payload({}, {"stale": int(server.number("stale")) + 1})


@dataclass(frozen=True)
class _Predict(Personal):
    """The best network so far arrives and predicts the client's learning rates."""

    validation: float
    mask_padding: bool
    all_padding: bool

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return server.part(_BEST)

    @torch.no_grad()
    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        load_base(client, site)
        parts = in_two(site, self.validation, at.seed)
        seen, features = features_of(client, parts, self.mask_padding, self.all_padding)
        # In memory of their own: see `befit.methods.parts.budget.stages.generator_of`.
        multiples = rate_multiples({key: value.clone() for key, value in received.arrays.items()}, seen)
        site.report.update({"rate_mean": float(multiples.mean()), "rate_max": float(multiples.max())})
        return client | Payload({**features, _MULTIPLES: multiples}), Payload()


@dataclass(frozen=True)
class _AtOwnRates(Personal):
    """LoRA on the part that the network was not validated on, each tensor at its rate."""

    epochs: int | None
    validation: float

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        base, parts = resume(client, site), in_two(site, self.validation, at.seed)
        optimiser = rated_optimiser(site)
        load_moments(optimiser, BUDGETED, client.part(MOMENTS).arrays)
        steps = steps_for(parts, self.epochs)
        budget = replace(site.budget, max_steps=steps)
        loss = train_at(
            parts,
            optimiser,
            made_before(client, _MULTIPLES, site, "rates of its own"),
            parts.batches("train", steps, at),
            lambda step: learning_rate(budget, step, at),
            base,
        )
        site.report.update({"steps": float(steps), "loss": loss})
        running = Payload().with_part(MOMENTS, Payload(dump_moments(optimiser, BUDGETED)))
        return updated_memory(client, site.model.dump(slot(BUDGETED)), running, at), Payload()
