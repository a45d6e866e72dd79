"""The training loop: every pass takes one optimiser step on every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from befit.adapters.keys import Selector, slot
from befit.adapters.mixers import Mix, forward_passes
from befit.core.values import Payload, State, Tick
from befit.protocol.work import Work
from befit.train.blend import Blend
from befit.train.optim import MOMENTS, dump_moments, learning_rate, load_moments, make_optimiser
from befit.train.terms import Guide, Term

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site
    from befit.tasks.base import Batch


class TrainingDiverged(RuntimeError):
    """The loss is not a finite number any more."""


@dataclass(frozen=True)
class Pass:
    """What one optimiser trains, with which slots active, and what guides it beside the task's loss.

    keep_optimiser  whether the optimiser's running averages stay with the client from round to round; right for a
                    slot that no download overwrites
    first_round     the round from which on the pass takes part
    blend           how strongly the terms count against the task; None adds them to it
    rates           parts that learn at a rate of their own, each with a multiple of the budget's
    after           called with the number of each step, from 0, once it is taken; the step's gradients are still there
    """

    trainable: Selector
    active: tuple[str, ...]
    terms: tuple[Term, ...] = ()
    mixer: Mix = "sum"
    name: str = "train"
    keep_optimiser: bool = False
    first_round: int = 1
    blend: Blend | None = None
    rates: tuple[tuple[Selector, float], ...] = ()
    after: Callable[[int], None] | None = None

    @property
    def work(self) -> tuple[Work, ...]:
        """This pass, and what its terms compute beside it."""
        together = forward_passes(self.mixer, self.active)
        own = [self.trainable if len(together) == 1 else self.trainable & slot(*slots) for slots in together]
        return (
            *(Work(slots, chosen) for slots, chosen in zip(together, own, strict=True)),
            *(work for term in self.terms for work in getattr(term, "work", ())),
        )


@dataclass(frozen=True)
class TrainingReport:
    """Mean task loss of each pass over the steps taken, and the optimisers' kept averages."""

    steps: int
    losses: dict[str, float]
    moments: State = field(default_factory=dict)

    @property
    def memory(self) -> Payload:
        """The kept averages as a part of a client's memory: what the next round's `train` finds there."""
        return Payload().with_part(MOMENTS, Payload(self.moments))

    def numbers(self) -> dict[str, float]:
        """For the log: `loss` is the first pass's, the others carry their pass's name."""
        (_, first), *others = self.losses.items()
        return {"steps": float(self.steps), "loss": first, **{f"loss_{name}": loss for name, loss in others}}


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
    model, budget = site.model, site.budget
    steps = budget.max_steps if steps is None else steps
    passes = [current for current in passes if current.first_round <= at.round]
    optimisers = [make_optimiser(_groups(model, current), budget) for current in passes]
    guides = [[term.bind(site) for term in current.terms] for current in passes]
    strengths = [current.blend.strength(site, at) if current.blend else None for current in passes]
    moments = {} if memory is None else memory.part(MOMENTS).arrays
    for current, optimiser in zip(passes, optimisers, strict=True):
        if current.keep_optimiser:
            load_moments(optimiser, current.name, moments)
    totals = [torch.zeros((), device=model.device) for _ in passes]
    with model.training(True):
        everything = list(range(len(passes)))
        for together in ([index] for index in everything) if in_sequence else (everything,):
            for step, batch in enumerate(site.batches(split, steps, at)):
                rate = learning_rate(budget, step, at)
                for index in together:
                    current = passes[index]
                    with model.active(*current.active, mixer=current.mixer), model.trainable(current.trainable):
                        logits = site.logits(batch)
                        task_loss = site.task.loss(logits, batch)
                        objective = _objective(task_loss, guides[index], strengths[index], batch, logits)
                        model.zero_gradients()
                        objective.backward()
                    if budget.grad_clip:
                        torch.nn.utils.clip_grad_norm_(model.parameters(current.trainable), budget.grad_clip)
                    for group in optimisers[index].param_groups:
                        group["lr"] = rate * group["multiple"]
                    optimisers[index].step()
                    if current.after is not None:
                        current.after(step)
                    totals[index] += task_loss.detach()
    losses = {current.name: float(total) / max(1, steps) for current, total in zip(passes, totals, strict=True)}
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss of pass {name!r} became {loss} within {steps} steps at learning rate "
                f"{budget.lr}; try a smaller train.lr or set train.grad_clip"
            )
    kept: State = {}
    for current, optimiser in zip(passes, optimisers, strict=True):
        if current.keep_optimiser:
            kept |= dump_moments(optimiser, current.name)
    return TrainingReport(steps, losses, kept)


def _groups(model: AdaptedModel, current: Pass) -> list[dict[str, Any]]:
    """What a pass trains, by learning rate: first all that has the budget's."""
    rest, groups = current.trainable, []
    for chosen, multiple in current.rates:
        groups.append({"params": model.parameters(rest & chosen), "multiple": multiple})
        rest = rest & ~chosen
    return [{"params": model.parameters(rest), "multiple": 1.0}, *groups]


def _objective(task: Tensor, guides: Sequence[Guide], beta: float | None, batch: Batch, logits: Tensor) -> Tensor:
    """`task + sum of terms`, or `(1 - beta) task + beta * sum of terms`; with beta 0 the task's loss itself."""
    if beta == 0:
        return task
    objective = task if beta is None else (1 - beta) * task
    for guide in guides:
        term = guide(batch, logits)
        objective = objective + (term if beta is None else beta * term)
    return objective
