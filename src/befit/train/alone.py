"""The training of one client by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from befit.core.values import State
from befit.tasks.base import Batch
from befit.train.optim import MOMENTS, dump_moments, load_moments
from befit.train.passes import objective
from befit.train.private import Private
from befit.train.replay import Steps, rounded, steps_of
from befit.train.request import Learner, OfOneClient, Request, TrainingReport
from befit.train.terms import Guide, task_loss


def train_alone(request: Request) -> TrainingReport:
    """Take its steps on the model as it stands."""
    captured = steps_of(request) if request.site.mechanism is None else None
    if captured is not None:
        captured.begin()
    optimisers = request.optimisers() if captured is None else captured.optimisers
    moments = request.memory.part(MOMENTS).arrays
    for current, optimiser in zip(request.passes, optimisers, strict=True):
        if current.keep_optimiser:
            load_moments(optimiser, current.name, moments)
    totals = [float(total) for total in request.run(optimisers, _learner(request, captured))]
    kept: State = {}
    for current, optimiser in zip(request.passes, optimisers, strict=True):
        if current.keep_optimiser:
            kept |= dump_moments(optimiser, current.name)
    return request.report(totals, kept)


def _learner(request: Request, captured: Steps | None) -> Learner:
    if request.site.mechanism is None:
        return _Alone(request, captured)
    return Private(request, request.site.mechanism)


class _Alone(OfOneClient):
    """One client's gradients.

    captured  what replays its steps, where they are captured
    """

    def __init__(self, request: Request, captured: Steps | None) -> None:
        super().__init__(request)
        self._captured = captured
        self._guides = [[term.bind(request.site) for term in current.terms] for current in request.passes]

    def batches(self) -> Iterator[list[Batch]]:
        """The parts of each step's batch that go through the model together."""
        request, site = self._request, self._request.site
        examples = site.examples(request.split)
        for rows in site.indices(request.split, request.steps, request.at):
            parts = [examples.batch(part) for part in rows.split(site.budget.micro_batch or len(rows))]
            shaped = parts if self._captured is None else [rounded(part, site.task) for part in parts]
            yield [site.to_device(part) for part in shaped]

    def take(self, step: Callable[[int, list[Batch]], Tensor], index: int, batch: list[Batch]) -> Tensor:
        return step(index, batch) if self._captured is None else self._captured.take(step, index, batch)

    def backward(self, index: int, batch: list[Batch]) -> Tensor:
        site, guides, strength = self._request.site, self._guides[index], self._request.strengths[index]
        if len(batch) == 1:
            logits = site.logits(batch[0])
            loss = task_loss(site, logits, batch[0])
            objective(loss, guides, strength, batch[0], logits).backward()
            return loss.detach()
        terms, counts = sum(site.task.terms(part).sum() for part in batch), self._counts(index, batch)
        losses = []
        for place, part in enumerate(batch):
            logits = site.logits(part)
            loss = site.task.sample_losses(logits, part, "sum").sum() / terms
            shares = [_share(guide, of_parts, place) for guide, of_parts in zip(guides, counts, strict=True)]
            objective(loss, shares, strength, part, logits).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _counts(self, index: int, batch: list[Batch]) -> list[Sequence[Tensor | int]]:
        """For each term of a pass, how much each part of a batch is of it.

        It is a mean over samples or over positions, or the same for each part: its parts by size add up to it anyway.
        """
        task, sizes = self._request.site.task, [len(part["labels"]) for part in batch]
        return [
            [task.positions(part).sum() for part in batch] if getattr(term, "of_positions", False) else sizes
            for term in self._request.passes[index].terms
        ]


def _share(guide: Guide, counts: Sequence[Tensor | int], place: int) -> Guide:
    """One part's share of the whole batch's term."""
    share = counts[place] / sum(counts)
    return lambda part, logits: share * guide(part, logits)
