"""LoRA (Hu et al. 2021) as a personal stage: the same rank in every module, on top of any method's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from befit.adapters.bayestune import BUDGETED
from befit.adapters.layout import Layout, Slot
from befit.core.schema import Mark, at_least
from befit.methods.parts.budget.base import MethodBlock
from befit.methods.parts.budget.stages import OnBase, TrainAlone
from befit.protocol.context import Context, Problem
from befit.protocol.method import Method, Needs
from befit.protocol.registry import register
from befit.protocol.stage import Stage


@register("lora", title="LoRA", paper="arXiv:2106.09685", year=2021)
@dataclass(frozen=True)
class Lora(OnBase):
    """Train one adapter alone with rank r in each module: what every other way to spend r L ranks has to beat.

    rank    r of the budget: r ranks in each of L target modules; 0 trains the task head alone
    base    the method whose result is personalised: {name: fedit, rounds: 100, train: {lr: 5e-5}}; null: none
    scale   s of delta = s B A; alpha is s r
    epochs  passes over the client's examples; null: train.max_steps in each of federation.rounds

    up = down = what the base method sends, no more.

    Source: Hu et al. 2021, eq. 3; docs/methods/lora.md.
    """

    rank: Annotated[int, at_least(0)] = 8
    base: MethodBlock = None
    scale: float = 2.0
    epochs: Annotated[int | None, Mark.PASSES] = None
    layout: Layout = field(init=False)
    before: Method | None = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        rank = self.rank or 1
        slot = Slot(BUDGETED, rank, self.scale * rank, targets=None if self.rank else ())
        self.prepare(Layout((slot,)), self.base, "lora")

    def check(self, context: Context) -> list[Problem]:
        problems = super().check(context)
        if self.rank or all(shapes.heads for shapes in context.shapes.values()):
            return problems
        return [*problems, Problem("error", "rank", "0 trains the task head alone, and here none is trained")]

    def own_stages(self) -> list[Stage]:
        return [TrainAlone(self.epochs).stage()]
