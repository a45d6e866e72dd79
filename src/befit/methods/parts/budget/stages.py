"""What methods share that personalise the result of another method, their base, or the bare backbone: `OnBase`, and
the stages in which a client learns scales of its own and the adapters that its budgets keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED, SCALES
from befit.adapters.keys import NOTHING, join, select, slot
from befit.adapters.layout import Extra, Layout
from befit.core.errors import NotTrained, nothing_to_deploy
from befit.core.metrics import TIED, relative_range
from befit.core.schema import Mark
from befit.core.values import ClientInfo, Payload, State, Tick
from befit.methods.parts.budget.allocate import ALLOCATION
from befit.methods.parts.budget.base import (
    MethodBlock,
    base_slots,
    base_stages,
    check_base,
    fixed,
    load_base,
    make_base,
    with_base,
    with_layout,
)
from befit.methods.parts.budget.features import features
from befit.methods.parts.budget.generator import GENERATOR, generate
from befit.methods.parts.budget.personal import (
    WEIGHTS,
    Budgets,
    Limit,
    budgeted_layout,
    fine_tune,
    make_budgets,
    pruned,
    restored,
    steps_for,
)
from befit.methods.parts.budget.search import ScaleSearch, Search, searching
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Diagnostic, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Message, Personal, Stage
from befit.protocol.work import Work
from befit.train.loop import training
from befit.train.optim import MOMENTS
from befit.train.passes import Pass

LEARNT = "scales/all/lambda"
TIES = Diagnostic(
    "alarm",
    ("scale_spread",),
    f"All scales of ranks are equal to {TIED:.0e} for {{clients}}, so the chosen ranks are arbitrary.",
    limit=TIED,
)
SCALE = Diagnostic("number", ("scale_mean",), "The mean of all scales of ranks.")
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
    """The client's features, and the same as arrays to keep: the model is frozen, so one pass is enough.

    Data that arrive over time are read anew. The model holds the base.
    """
    if site.stream is None and _SEEN in client.arrays:
        return client.arrays[_SEEN].clone(), {}
    seen = features(site, *base_slots(client), mask_padding=mask_padding, all_padding=all_padding)
    return seen, {_SEEN: seen}


@dataclass(frozen=True)
class SearchAlone(Personal):
    """The client learns its scales from its own data alone."""

    how: Search
    epochs: int | None
    rounds: int

    def stage(self) -> Stage:
        return Stage("search", self, rounds=1, trains=NOTHING)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        base = load_base(client, site)
        learnt = yield from searching(site, at, self.how, steps_for(site, self.epochs, self.rounds), base)
        return client | Payload({LEARNT: learnt}), Payload()


def made_before(client: Payload, key: str, site: Site, what: str) -> Tensor:
    """What a stage of one round left with the client. Raises NotTrained where it was away then."""
    if key not in client.arrays:
        raise NotTrained(f"client {site.info.id} has no {what}: it was away in the round that makes them")
    return client.arrays[key]


@dataclass(frozen=True)
class Predict(Personal):
    """The generator that arrives predicts the client's scales; once, for all budgets (Lee et al. 2025a, Figure 1)."""

    mask_padding: bool
    all_padding: bool
    precision: torch.dtype = torch.float32

    def stage(self) -> Stage:
        return Stage("scales", self, None, Message(slot(GENERATOR)), rounds=1, trains=NOTHING)

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(select(server.arrays, slot(GENERATOR)))

    @torch.no_grad()
    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        load_base(client, site)
        seen, kept = features_of(client, site, self.mask_padding, self.all_padding)
        scales = generate(generator_of(received), seen, self.precision).view(len(site.model.shapes.targets), -1)
        site.report.update({"scale_mean": float(scales.mean()), "scale_max": float(scales.max())})
        return client | Payload({**kept, LEARNT: scales}), Payload()


@dataclass(frozen=True)
class FineTune(Personal):
    """Prune to each budget, take fresh A and B, and train them beside frozen scales (Lee et al. 2025a, Figure 1)."""

    budgets: Budgets
    epochs: int | None

    def stage(self) -> Stage:
        return Stage("budget", self, rounds=None if self.epochs is None else 1, trains=WEIGHTS)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        base, memory = load_base(client, site), client.with_part(MOMENTS, Payload())
        learnt = made_before(client, LEARNT, site, "scales of its ranks")
        site.report["scale_mean"] = float(learnt.mean())
        site.report["scale_spread"] = relative_range(learnt.flatten().tolist())
        for name in self.budgets.names:
            site.model.reset()
            load_base(client, site)
            if select(memory.arrays, slot(name)):
                start = restored(memory.arrays, name, site)
            else:
                start = {
                    **site.model.dump(slot(BUDGETED)),
                    **pruned(site, learnt, self.budgets.count(name, learnt, site)),
                }
            steps = steps_for(site, self.epochs)
            stored, running = yield from fine_tune(site, at, name, start, client, steps, base)
            memory |= Payload(stored)
            if at.round < at.rounds:  # nothing goes on after the last round
                memory |= running
        return memory, Payload()


def deploy_budgets(client: Payload, site: Site, budgets: Budgets) -> Deployment:
    """The base and the budgeted adapter; those of the other budgets beside it. Raises NotTrained without one."""
    if not select(client.arrays, slot(BUDGETED)):
        raise nothing_to_deploy(site.info.id, BUDGETED)
    slots = (*base_slots(client), BUDGETED)
    deployments = {
        r: Deployment({**fixed(client), **restored(client.arrays, name, site)}, slots)
        for name, r in budgets.names.items()
    }
    main = deployments[budgets.rank]
    # A client with a limit of its own has no adapter of the common rank to be measured as one.
    own_limit = budgets.limit(site.info.id) != Limit(budgets.rank)
    others = {f"r{r}": other for r, other in deployments.items() if not (own_limit and r == budgets.rank)}
    learnt = {"learnt/all/lambda": client.arrays[LEARNT]} if LEARNT in client.arrays else {}
    return Deployment(main.arrays, main.slots, main.mixer, others if len(deployments) > 1 else {}, learnt)


class OnBase(Method):
    """The base's stages and memories, then our own stages; deployed is the base and the adapter in our slot.

    A subclass is a frozen dataclass that calls `prepare` and says what its `own_stages` are.
    """

    rank: int
    base: MethodBlock
    before: Method | None
    opening: Sequence[Stage]

    def prepare(self, layout: Layout, base: Mapping[str, Any] | None, owner: str) -> None:
        """Make the base of its block. Raises ConfigError for one that cannot be a base."""
        object.__setattr__(self, "before", None)
        before = make_base(base, [stage.name for stage in self.own_stages()], owner)
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "opening", base_stages(base, before))  # made once: every update asks for the plan
        object.__setattr__(self, "layout", with_layout(layout, base, before))
        object.__setattr__(self, "needs", Needs() if before is None else replace(before.needs, mixed=False))
        reported = () if before is None else before.diagnostics
        object.__setattr__(self, "diagnostics", (*reported, *type(self).diagnostics))

    def own_stages(self) -> list[Stage]:
        raise NotImplementedError

    def check(self, context: Context) -> list[Problem]:
        return check_base(self.base, self.before, context)

    def plan(self) -> Sequence[Stage]:
        return [*self.opening, *self.own_stages()]

    @property
    def use(self) -> Use:  # type: ignore[override]
        return Use((*(() if self.before is None else self.before.use.slots), BUDGETED))

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED,), slot(BUDGETED)),)

    def server_init(self, site: ServerSite) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.server_init(site))

    def client_init(self, site: Site) -> Payload:
        return with_base(Payload(), None if self.before is None else self.before.client_init(site))

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return deploy_budgets(client, site, Budgets(self.rank))


@dataclass(frozen=True)
class ByScales(OnBase):
    """Of a client's ranks those with the largest learnt scales are kept, as many as its budgets have."""

    rank: int = 8
    budgets: tuple[int, ...] = ()
    rank_max: int = 16
    parameters: Annotated[int | None, Mark.CAP] = None
    megabytes: float | None = None
    limits: dict[str, Any] | None = None
    base: MethodBlock = None
    scale: float = 2.0
    epochs: Annotated[int | None, Mark.PASSES] = None
    search: ScaleSearch = ScaleSearch()  # noqa: RUF009 frozen
    preset: Literal["recommended", "parity"] = "recommended"
    layout: Layout = field(init=False)
    kept: Budgets = field(init=False)
    before: Method | None = field(init=False)
    needs: Needs = field(init=False)

    diagnostics = (TIES, SCALE)

    def prepare_with(self, owner: str, *extras: Extra) -> None:
        kept = make_budgets(owner, self.rank, self.budgets, self.rank_max, self.parameters, self.megabytes, self.limits)
        object.__setattr__(self, "kept", kept)
        self.prepare(budgeted_layout(2 * self.rank_max, self.scale, self.preset != "parity", extras), self.base, owner)

    def check(self, context: Context) -> list[Problem]:
        return [*super().check(context), *self.kept.check(context)]

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        return deploy_budgets(client, site, self.kept)


@dataclass(frozen=True)
class TrainAlone(Personal):
    """The client trains our slot on top of its base, from the common start or from where the last round left it.

    epochs  passes over its examples, in a single round; None for train.max_steps in every round
    """

    epochs: int | None

    def stage(self) -> Stage:
        rounds = None if self.epochs is None else 1
        return Stage("budget", self, rounds=rounds, trains=slot(BUDGETED))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        base = resume(client, site)
        step = Pass(slot(BUDGETED), (*base, BUDGETED), name=BUDGETED, keep_optimiser=True)
        report = yield from training(site, [step], at, steps=steps_for(site, self.epochs), memory=client)
        site.report.update(report.numbers())
        return updated_memory(client, site.model.dump(slot(BUDGETED)), report.memory, at), Payload()


def resume(client: Payload, site: Site) -> tuple[str, ...]:
    """Put the client's base and, where an earlier round left one, its adapter into the model; the base's slots."""
    base = load_base(client, site)
    site.model.load(select(client.arrays, slot(BUDGETED)))
    return base


def updated_memory(client: Payload, adapter: State, running: Payload, at: Tick) -> Payload:
    """The client's memory with a new adapter in place of the one before; `running` is what the next round goes on from,
    if there is one."""
    others = Payload({key: value for key, value in client.arrays.items() if not slot(BUDGETED)(key)}, client.scalars)
    kept = others.with_part(MOMENTS, Payload()).with_part(ALLOCATION, Payload())
    return kept | Payload(adapter) | (running if at.round < at.rounds else Payload())
