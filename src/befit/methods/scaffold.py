"""SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch

from befit.adapters.keys import select, slot, split, to_slot
from befit.adapters.layout import Layout, lora
from befit.adapters.state import add, rename, scale, weighted_mean
from befit.core.schema import POSITIVE, Mark
from befit.core.values import ClientInfo, ClientWeights, Payload, State, Tick, Update
from befit.merge.clients import counts_of
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Specs, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.optim import learning_rate
from befit.train.passes import Pass
from befit.train.terms import Tilt

CONTROL = "control"


@register("scaffold", title="SCAFFOLD", paper="arXiv:1910.06378", year=2020)
@dataclass(frozen=True)
class Scaffold(Method):
    """Correct every client's gradient by the difference of the mean drift c and its own c_k.

    rank       rank of the adapter
    alpha      its scaling: delta = alpha / rank * B A
    server_lr  step of the server
    weights    how the server averages: "uniform" (the paper) or "examples"

    Gradient `g - c_k + c`; after n steps at rate eta `c_k' = c_k - c - (theta_k - theta) / (n eta)` (option II); at the
    server `theta += server_lr * mean D_k`, `c += sum_k (c_k' - c_k) / K`.
    up = down = 2 r(d_in + d_out) per module: the control variates travel too. They assume SGD; with AdamW the
    correction enters before the optimiser, and c_k is computed as if it had been SGD, with a warning.

    Source: Karimireddy et al. 2020, Algorithm 1, option II; docs/methods/scaffold.md.
    """

    rank: int = 8
    alpha: float = 16.0
    server_lr: Annotated[float, Mark.SERVER, POSITIVE] = 1.0
    weights: ClientWeights = "uniform"
    layout: Layout = field(init=False)

    use = Use(("shared",))

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", lora(self.rank, self.alpha))

    def plan(self) -> Sequence[Stage]:
        shared = slot("shared")
        both = Message(shared, become=_with_controls, text=f"{shared} and its control variate")
        mean = "uniform" if self.weights == "uniform" else None  # control variates are never weighed
        return [Stage("federate", _Federate(self), up=both, down=both, trains=shared, mean=mean, reads=Gradients())]

    def work(self) -> tuple[Work, ...]:
        return (Work(("shared",), slot("shared")),)

    def check(self, context: Context) -> list[Problem]:
        budget = context.train
        if budget.optimiser == "sgd" and not budget.momentum:
            return []
        used = "sgd with momentum" if budget.optimiser == "sgd" else budget.optimiser
        text = (
            f"control variates assume plain SGD, and training is by {used}; the correction is applied to the gradients "
            "before it (train.optimiser: sgd)"
        )
        return [Problem("warning", "train.optimiser", text)]

    def server_init(self, site: ServerSite) -> Payload:
        shared = select(site.initial, slot("shared"))
        return Payload({**shared, **_zeros(shared)}, {"clients": len(site.clients)})

    def client_init(self, site: Site) -> Payload:
        return Payload(_zeros(site.model.dump(slot("shared"))))

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return Deployment(_split(received.arrays)[0], self.use.slots)


@dataclass(frozen=True)
class _Federate(Exchange):
    method: Scaffold

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(server.arrays)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        start, c = _split(received.arrays)
        _, own = _split(client.arrays)
        site.model.load(start)
        tilt = Tilt(add(c, scale(own, -1)))
        report = yield from training(site, [Pass(slot("shared"), ("shared",), (tilt,))], at)
        site.report.update(report.numbers())
        trained = site.model.dump(slot("shared"))
        rates = sum(learning_rate(site.budget, step, at) for step in range(report.steps))
        drift = scale(add(trained, scale(start, -1)), -1 / rates if rates else 0.0)
        if (ratio := site.budget.loraplus_ratio) != 1:  # B learned at so many times the rate
            drift = {key: value / ratio if split(key)[2] == "B" else value for key, value in drift.items()}
        renewed = add(add(own, scale(c, -1)), drift)
        # c and the change, as with the adapter: what is sent minus what came is what guard and privacy shorten.
        moved = add(c, add(renewed, scale(own, -1)))
        return Payload(rename(renewed, CONTROL)), Payload({**trained, **rename(moved, CONTROL)})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        weights = counts_of(updates, self.method.weights)
        theta, c = _split(server.arrays)
        mean = weighted_mean((_split(update.payload.arrays)[0] for update in updates), weights)
        moved = add(theta, scale(add(mean, scale(theta, -1)), self.method.server_lr))
        means = weighted_mean((_split(update.payload.arrays)[1] for update in updates), [1] * len(updates))
        c = add(c, scale(add(means, scale(c, -1)), len(updates) / len(site.clients)))
        return Payload({**moved, **rename(c, CONTROL)}, server.scalars)


def _zeros(shared: State) -> State:
    return rename({key: torch.zeros_like(value) for key, value in shared.items()}, CONTROL)


def _with_controls(specs: Specs) -> Specs:
    return {name: spec for key, spec in specs.items() for name in (key, to_slot(key, CONTROL))}


def _split(arrays: State) -> tuple[State, State]:
    """The adapter and the control variate, both under the adapter's keys."""
    control = select(arrays, slot(CONTROL))
    return select(arrays, slot("shared")), rename(control, "shared")
