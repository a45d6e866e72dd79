"""AdaLoRA (Zhang et al. 2023) as a personal stage: ranks move between modules while they are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from befit.adapters.bayestune import BUDGETED, Svd
from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout, Slot
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE, Mark, at_least, between
from befit.core.values import Payload, Tick
from befit.methods.parts.budget.allocate import ALLOCATION, Allocator, Orthogonality, Timetable, within_budget
from befit.methods.parts.budget.base import MethodBlock
from befit.methods.parts.budget.budget import compact, kept_ranks
from befit.methods.parts.budget.personal import steps_for, trained
from befit.methods.parts.budget.stages import OnBase, resume, updated_memory
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Method, Needs
from befit.protocol.registry import register
from befit.protocol.site import Site
from befit.protocol.stage import Personal, Stage
from befit.tasks import get_task
from befit.train.loop import training
from befit.train.passes import Pass


@register("adalora", title="AdaLoRA", paper="arXiv:2303.10512", year=2023)
@dataclass(frozen=True)
class AdaLora(OnBase):
    """Start with more ranks than the budget, and take the least important away until r L are left.

    rank        r of the budget: r L ranks for L target modules, anywhere in the model
    base        the method whose result is personalised: {name: fedit, rounds: 100, train: {lr: 5e-5}}; null: none
    init_rank   ranks of every module at the start; null: 1.5 r
    alpha       delta = alpha / init_rank * B diag(lambda) A
    orthogonal  weight of the mean distance of A A^T and B^T B from the identity; 0 leaves it out
    warmup      share of all steps before ranks are taken away
    final       share of all steps after the last choice
    interval    steps between two choices
    beta1       decay of the running sensitivity
    beta2       decay of its running uncertainty
    epochs      passes over the client's examples; null: train.max_steps in each of federation.rounds
    preset      "parity" leaves the orthogonality term out where there are classes, as the released code of FedP2EFT
                does without saying so

    `score = lambda's + mean of A's row + mean of B's column`, of entries smoothed `|theta grad|` times its smoothed
    deviation; after step t the `r L + (r_0 - r) L (1 - (t - t_i) / (T - t_f - t_i))^3` best of the model stay.
    up = down = what the base method sends, no more.

    Source: Zhang et al. 2023, eqs. 3, 4 and 7 to 12; docs/methods/adalora.md.
    """

    rank: int = 8
    base: MethodBlock = None
    init_rank: int | None = None
    alpha: float = 8.0
    orthogonal: Annotated[float, at_least(0)] = 0.1
    warmup: Annotated[float, between(0, 1)] = 0.1
    final: Annotated[float, between(0, 1)] = 0.3
    interval: Annotated[int, POSITIVE] = 1
    beta1: Annotated[float, between(0, 1)] = 0.85
    beta2: Annotated[float, between(0, 1)] = 0.85
    epochs: Annotated[int | None, Mark.PASSES] = None
    preset: Literal["recommended", "parity"] = "recommended"
    layout: Layout = field(init=False)
    before: Method | None = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        start, problems = self.start, list[str]()
        if start < self.rank:
            problems.append(f"init_rank: must not be below rank, {self.rank}, got {start}")
        if self.warmup + self.final >= 1:
            shares = f"{self.warmup} and {self.final}"
            problems.append(f"warmup: and final are shares of the steps that leave some between them, got {shares}")
        if problems:
            raise ConfigError(problems, "adalora")
        self.prepare(Layout((Slot(BUDGETED, start, self.alpha, form=Svd()),)), self.base, "adalora")

    @property
    def start(self) -> int:
        return -(-3 * self.rank // 2) if self.init_rank is None else self.init_rank

    def own_stages(self) -> list[Stage]:
        return [Stage("budget", _Adapt(self), rounds=None if self.epochs is None else 1, trains=slot(BUDGETED))]

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        """What lies at the client; where its timetable has not ended, as after a best round, cut to the budget."""
        adapter = select(client.arrays, slot(BUDGETED))
        if adapter and client.part(ALLOCATION).arrays:
            modules = list(site.model.shapes.targets)
            client |= Payload(within_budget(adapter, client, BUDGETED, modules, self.rank * len(modules)))
        return super().deploy(client, received, site)


@dataclass(frozen=True)
class _Adapt(Personal):
    method: AdaLora

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        how, base = self.method, resume(client, site)
        steps, modules = steps_for(site, how.epochs), len(site.model.shapes.targets)
        table = Timetable.over(
            steps * at.rounds, how.start * modules, how.rank * modules, how.warmup, how.final, how.interval
        )
        first = (at.round - 1) * steps
        allocator = Allocator(site.model, BUDGETED, table, (how.beta1, how.beta2), first, client)
        # PEFT adds the term in the wrapper of language models, which the released classification runs did not have.
        inactive = how.preset == "parity" and not get_task(site.task.name).writes_text
        terms = (Orthogonality(BUDGETED, how.orthogonal),) if how.orthogonal and not inactive else ()
        step = Pass(slot(BUDGETED), (*base, BUDGETED), terms, name=BUDGETED, keep_optimiser=True, after=allocator)
        report = yield from training(site, [step], at, steps=steps, memory=client)
        adapter = site.model.dump(slot(BUDGETED))
        ranks = kept_ranks({key.split("/")[1]: value for key, value in adapter.items() if key.endswith("/lambda")})
        numbers = {"ranks": sum(ranks.values()), "adapter_parameters": trained(site, ranks)}
        site.report.update({**report.numbers(), **{key: float(value) for key, value in numbers.items()}})
        if at.round == at.rounds:
            adapter = compact(adapter, BUDGETED)
        return updated_memory(client, adapter, report.memory | allocator.dump(), at), Payload()
