"""The training of one client by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from befit.adapters.keys import Selector
from befit.core.values import State
from befit.tasks.base import Batch
from befit.train.optim import MOMENTS, dump_moments, load_moments
from befit.train.passes import objective
from befit.train.private import Private
from befit.train.replay import Steps, rounded, steps_of
from befit.train.request import Learner, Request, TrainingReport
from befit.train.terms import task_loss


def train_alone(asked: Request) -> TrainingReport:
    """Take its steps on the model as it stands."""
    captured = steps_of(asked) if asked.site.mechanism is None else None
    if captured is not None:
        captured.begin()
    optimisers = asked.optimisers() if captured is None else captured.optimisers
    moments = asked.memory.part(MOMENTS).arrays
    for current, optimiser in zip(asked.passes, optimisers, strict=True):
        if current.keep_optimiser:
            load_moments(optimiser, current.name, moments)
    totals = [float(total) for total in asked.run(optimisers, _learner(asked, captured))]
    kept: State = {}
    for current, optimiser in zip(asked.passes, optimisers, strict=True):
        if current.keep_optimiser:
            kept |= dump_moments(optimiser, current.name)
    return asked.report(totals, kept)


def _learner(asked: Request, captured: Steps | None) -> Learner:
    if asked.site.mechanism is None:
        return _Alone(asked, captured)
    return Private(asked, asked.site.mechanism)


class _Alone:
    """One client's gradients.

    captured  what replays its steps, where they are captured
    """

    def __init__(self, asked: Request, captured: Steps | None) -> None:
        self._asked, self._captured = asked, captured
        self._guides = [[term.bind(asked.site) for term in current.terms] for current in asked.passes]

    def batches(self) -> Iterator[list[Batch]]:
        """The parts of each step's batch that go through the model together."""
        asked, site = self._asked, self._asked.site
        examples = site.examples(asked.split)
        for rows in site.indices(asked.split, asked.steps, asked.at):
            parts = [examples.batch(part) for part in rows.split(site.budget.micro_batch or len(rows))]
            shaped = parts if self._captured is None else [rounded(part, site.task) for part in parts]
            yield [site.to_device(part) for part in shaped]

    def take(self, step: Callable[[int, list[Batch]], Tensor], index: int, batch: list[Batch]) -> Tensor:
        return step(index, batch) if self._captured is None else self._captured.take(step, index, batch)

    def backward(self, index: int, batch: list[Batch]) -> Tensor:
        site, guides, strength = self._asked.site, self._guides[index], self._asked.strengths[index]
        if len(batch) == 1:
            logits = site.logits(batch[0])
            loss = task_loss(site, logits, batch[0])
            objective(loss, guides, strength, batch[0], logits).backward()
            return loss.detach()
        total, size = sum(site.task.terms(part).sum() for part in batch), sum(len(part["labels"]) for part in batch)
        losses = []
        for part in batch:
            logits, share = site.logits(part), len(part["labels"]) / size
            loss = site.task.sample_losses(logits, part, "sum").sum() / total
            # A term is a mean over samples, or the same for each part: its parts by size add up to it either way.
            shares = [lambda part, logits, guide=guide, share=share: share * guide(part, logits) for guide in guides]
            objective(loss, shares, strength, part, logits).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def clip(self, chosen: Selector, limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._asked.model.parameters(chosen), limit)

    def stepped(self, index: int, step: int) -> None:
        current = self._asked.passes[index]
        if current.after is not None:
            current.after(step, self._asked.model.leaves(current.reached))
