"""What a client does alone: scales of its own, and the adapters that its budgets keep of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED, SCALES
from befit.adapters.keys import NOTHING, join, select, slot
from befit.core.errors import NotTrained
from befit.core.metrics import TIED, relative_range
from befit.core.values import ClientInfo, Payload, State, Tick
from befit.methods.parts.budget.base import base_slots, fixed, load_base
from befit.methods.parts.budget.features import features
from befit.methods.parts.budget.generator import GENERATOR, generate
from befit.methods.parts.budget.personal import WEIGHTS, Budgets, Limit, fine_tune, pruned, restored, steps_for
from befit.methods.parts.budget.search import Search, search
from befit.protocol.method import Deployment, Diagnostic
from befit.protocol.site import Site
from befit.protocol.stage import Message, Personal, Stage
from befit.train.optim import MOMENTS

__all__ = [
    "TIES",
    "FineTune",
    "Predict",
    "SearchAlone",
    "deploy_budgets",
    "features_of",
    "generator_of",
    "load_scales",
]

LEARNT = "scales/all/lambda"
TIES = Diagnostic(
    "alarm",
    ("scale_spread",),
    f"All scales of ranks are equal to {TIED:.0e} for {{clients}}, so the chosen ranks are arbitrary.",
    limit=TIED,
)
_SEEN = "features/all/f"


def generator_of(received: Payload) -> State:
    """The generator that arrived, in memory of its own: products of arrays that are read in place from a message can
    differ in the last bit with where in it they lie."""
    return {key: value.clone() for key, value in select(received.arrays, slot(GENERATOR)).items()}


def load_scales(site: Site, scales: Tensor) -> None:
    """Where the search starts, (L, r_init)."""
    names = site.model.shapes.targets
    site.model.load({join(SCALES, name, "lambda"): row for name, row in zip(names, scales, strict=True)})


def features_of(client: Payload, site: Site, mask_padding: bool, all_padding: bool = False) -> tuple[Tensor, State]:
    """The client's features, and as arrays to keep: the model that they are of is frozen, so one pass is enough.

    Data that arrive over time are looked at anew. The model holds the base.
    """
    if site.stream is None and _SEEN in client.arrays:
        return client.arrays[_SEEN].clone(), {}
    found = features(site, *base_slots(client), mask_padding=mask_padding, all_padding=all_padding)
    return found, {_SEEN: found}


@dataclass(frozen=True)
class SearchAlone(Personal):
    """The client learns its scales from its own data alone."""

    how: Search
    epochs: int | None
    rounds: int

    def stage(self) -> Stage:
        return Stage("search", self, rounds=1, trains=NOTHING)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        base = load_base(client, site)
        learnt = search(site, at, self.how, steps_for(site, self.epochs, self.rounds), base)
        return client | Payload({LEARNT: learnt}), Payload()


@dataclass(frozen=True)
class Predict(Personal):
    """The generator that arrives says the client's scales; once, for all budgets (Lee et al. 2025, Figure 1)."""

    mask_padding: bool
    all_padding: bool
    held: torch.dtype = torch.float32

    def stage(self) -> Stage:
        return Stage("scales", self, None, Message(slot(GENERATOR)), rounds=1, trains=NOTHING)

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(select(server.arrays, slot(GENERATOR)))

    @torch.no_grad()
    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        load_base(client, site)
        seen, kept = features_of(client, site, self.mask_padding, self.all_padding)
        scales = generate(generator_of(received), seen, self.held).view(len(site.model.shapes.targets), -1)
        site.report.update({"scale_mean": float(scales.mean()), "scale_max": float(scales.max())})
        return client | Payload({**kept, LEARNT: scales}), Payload()


@dataclass(frozen=True)
class FineTune(Personal):
    """Prune to each budget, take fresh A and B, and train them beside frozen scales (Lee et al. 2025, Figure 1)."""

    budgets: Budgets
    epochs: int | None

    def stage(self) -> Stage:
        return Stage("budget", self, rounds=None if self.epochs is None else 1, trains=WEIGHTS)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        base, memory = load_base(client, site), client.with_part(MOMENTS, Payload())
        site.report["scale_spread"] = relative_range(client.arrays[LEARNT].flatten().tolist())
        for name in self.budgets.names:
            site.model.reset()
            load_base(client, site)
            if select(memory.arrays, slot(name)):
                start = restored(memory.arrays, name, site)
            else:
                scales = client.arrays[LEARNT]
                start = {
                    **site.model.dump(slot(BUDGETED)),
                    **pruned(site, scales, self.budgets.count(name, scales, site)),
                }
            steps = steps_for(site, self.epochs)
            stored, running = fine_tune(site, at, name, start, client, steps, base)
            memory |= Payload(stored)
            if at.round < at.rounds:  # nothing goes on after the last round
                memory |= running
        return memory, Payload()


def deploy_budgets(client: Payload, site: Site, budgets: Budgets) -> Deployment:
    """The base and the budgeted adapter; those of the other budgets beside it. Raises NotTrained without one."""
    if not select(client.arrays, slot(BUDGETED)):
        raise NotTrained(
            f"client {site.info.id} has no {BUDGETED!r} adapter: it never completed the stage that makes "
            "it, so there is nothing to deploy"
        )
    slots = (*base_slots(client), BUDGETED)
    found = {
        r: Deployment({**fixed(client), **restored(client.arrays, name, site)}, slots)
        for name, r in budgets.names.items()
    }
    main = found[budgets.rank]
    # A client with a limit of its own has no adapter of the common rank to be measured as one.
    own = budgets.limit(site.info.id) != Limit(budgets.rank)
    others = {f"r{r}": one for r, one in found.items() if not (own and r == budgets.rank)} if len(found) > 1 else {}
    learnt = {"learnt/all/lambda": client.arrays[LEARNT]} if LEARNT in client.arrays else {}
    return Deployment(main.arrays, main.slots, main.mixer, others, learnt)
