"""The training loop: every pass takes one optimiser step on every batch."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from befit.adapters.keys import factor
from befit.core.values import Payload, Tick
from befit.protocol.jobs import finish
from befit.train.alone import train_alone
from befit.train.fleet import kin_of, train_together
from befit.train.passes import Pass
from befit.train.request import Request, TrainingReport

if TYPE_CHECKING:
    from befit.protocol.site import Site


class Training(Request):
    """A request that is done alone, or together with those of its kin."""

    def alone(self) -> TrainingReport:
        return train_alone(self)

    @property
    def kin(self) -> Hashable:
        return kin_of(self)

    def together(
        self, others: Sequence[Training], starts: Sequence[Tensor], draws: Sequence[Tensor]
    ) -> Sequence[tuple[TrainingReport | Exception, Tensor, Tensor]]:
        return train_together([self, *others], starts, draws)


def train(
    site: Site,
    passes: Sequence[Pass],
    at: Tick,
    *,
    steps: int | None = None,
    memory: Payload | None = None,
    split: str = "train",
    in_sequence: bool = False,
) -> TrainingReport:
    """Take `steps` steps (default: the budget's) of each pass on mini-batches of `split`.

    For each batch the passes step one after the other, so a later pass sees what an earlier one changed; with
    `in_sequence` each pass goes over all batches before the next one starts. Terms keep to the values from before the
    first batch. Passes whose first round is still to come are left out. Raises TrainingDiverged if a pass's mean loss
    is not finite.

    memory  the client's, in which an earlier round may have left what its report says `memory` is
    """
    return finish(training(site, passes, at, steps=steps, memory=memory, split=split, in_sequence=in_sequence))


def training(
    site: Site,
    passes: Sequence[Pass],
    at: Tick,
    *,
    steps: int | None = None,
    memory: Payload | None = None,
    split: str = "train",
    in_sequence: bool = False,
) -> Generator[Training, TrainingReport, TrainingReport]:
    """The same, asked for: `report = yield from training(…)` in a client's update lets it train with other clients at
    once, see `befit.train.fleet`. An update that leaves out the `yield from` fails."""
    asked = _asked(site, passes, at, steps, memory or Payload(), split, in_sequence)
    site.asked.append(asked)
    return asked


def _asked(
    site: Site,
    passes: Sequence[Pass],
    at: Tick,
    steps: int | None,
    memory: Payload,
    split: str,
    in_sequence: bool,
) -> Generator[Training, TrainingReport, TrainingReport]:
    now = tuple(current for current in passes if current.first_round <= at.round)
    if (ratio := site.budget.loraplus_ratio) != 1:
        now = tuple(replace(current, rates=(*current.rates, (factor("B"), ratio))) for current in now)
    strengths = tuple(current.blend.strength(site, at) if current.blend else None for current in now)
    count = site.budget.max_steps if steps is None else steps
    if count != site.budget.max_steps:  # which schedules go by
        site = replace(site, budget=replace(site.budget, max_steps=count))
    site.steps.append(count)
    dropout = site.model.dropout
    return (yield Training(site, now, strengths, at, count, memory, split, in_sequence, dropout))
