"""The training loop: every pass takes one optimiser step on every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from befit.adapters.keys import NOTHING, Selector, factor, slot
from befit.adapters.mixers import ByInput, Mix, forward_passes
from befit.core.errors import BefitError
from befit.core.values import Payload, State, Tick
from befit.protocol.jobs import finish
from befit.protocol.work import Work
from befit.train.blend import Blend
from befit.train.optim import MOMENTS, dump_moments, learning_rate, load_moments, make_optimiser, set_rate
from befit.train.replay import Steps, rounded, steps_of
from befit.train.terms import Guide, Laned, Term, task_loss

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site
    from befit.tasks.base import Batch


class TrainingDiverged(BefitError, RuntimeError):
    """The loss is not a finite number any more."""


@dataclass(frozen=True)
class Pass:
    """What one optimiser trains, with which slots active, and what guides it beside the task's loss.

    keep_optimiser  whether the optimiser's running averages stay with the client from round to round; right for a
                    slot that no download overwrites
    first_round     the round from which on the pass takes part
    blend           how strongly the terms count against the task; None adds them to it
    rates           parts that learn at a rate of their own, each with a multiple of the budget's
    after           called with the number of each step, from 0, once it is taken, and what is trained, by key; the
                    step's gradients are still there
    beside          what gets gradients too, for `after` to train
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
    after: Callable[[int, Mapping[str, Tensor]], None] | None = None
    beside: Selector = NOTHING

    @property
    def reached(self) -> Selector:
        """What gets gradients."""
        return self.trainable if self.beside == NOTHING else self.trainable | self.beside

    @property
    def lone(self) -> str:
        """Why clients take this pass one by one; empty where several can at once, see `befit.train.fleet`."""
        terms = [term for term in self.terms if not isinstance(term, Laned)]
        if terms:
            return f"its term {type(terms[0]).__name__} is written for one client"
        return "its slots are weighed by each input" if isinstance(self.mixer, ByInput) else ""

    @property
    def rated(self) -> list[tuple[Selector, float]]:
        """What it trains, by multiple of the learning rate: first all that has the budget's."""
        rest, groups = self.trainable, []
        for chosen, multiple in self.rates:
            groups.append((rest & chosen, multiple))
            rest = rest & ~chosen
        return [(rest, 1.0), *groups]

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
    """Mean task loss of each pass over the steps taken, and the optimisers' kept averages.

    There are no losses where single examples are protected: they are computed from records without noise.
    """

    steps: int
    losses: dict[str, float]
    moments: State = field(default_factory=dict)

    @property
    def memory(self) -> Payload:
        """The kept averages as a part of a client's memory: what the next round's `train` finds there."""
        return Payload().with_part(MOMENTS, Payload(self.moments))

    def numbers(self) -> dict[str, float]:
        """For the log: `loss` is the first pass's, the others carry their pass's name."""
        losses = {f"loss_{name}" if number else "loss": loss for number, (name, loss) in enumerate(self.losses.items())}
        return {"steps": float(self.steps), **losses}


@dataclass(frozen=True)
class Training:
    """What a client asks for: the arguments of `train`, and what they come to with the model as it stands.

    passes     those that take part in this round
    strengths  of their blends, see `Blend.strength`
    dropout    the adapters'
    """

    site: Site
    passes: tuple[Pass, ...]
    strengths: tuple[float | None, ...]
    at: Tick
    steps: int
    memory: Payload
    split: str
    in_sequence: bool
    dropout: float

    @property
    def model(self) -> AdaptedModel:
        return self.site.model

    def alone(self) -> TrainingReport:
        """Train this client by itself."""
        captured = steps_of(self) if self.site.mechanism is None else None
        if captured is not None:
            captured.begin()
        optimisers = self.optimisers() if captured is None else captured.optimisers
        moments = self.memory.part(MOMENTS).arrays
        for current, optimiser in zip(self.passes, optimisers, strict=True):
            if current.keep_optimiser:
                load_moments(optimiser, current.name, moments)
        totals = [float(total) for total in self.run(optimisers, self._learner(captured))]
        kept: State = {}
        for current, optimiser in zip(self.passes, optimisers, strict=True):
            if current.keep_optimiser:
                kept |= dump_moments(optimiser, current.name)
        return self.report(totals, kept)

    def _learner(self, captured: Steps | None) -> Learner:
        if self.site.mechanism is None:
            return _Alone(self, captured)
        from befit.train.private import Private

        return Private(self, self.site.mechanism)

    def optimisers(self, on: torch.device | None = None) -> list[torch.optim.Optimizer]:
        """One for each pass, over the model's parameters; `on` as `make_optimiser` has it."""
        return [
            make_optimiser(
                [{"params": self.model.parameters(chosen), "multiple": rate} for chosen, rate in current.rated],
                self.site.budget,
                on,
            )
            for current in self.passes
        ]

    @property
    def kin(self) -> Hashable:
        from befit.train.fleet import kin_of

        return kin_of(self)

    def together(
        self, others: Sequence[Training], starts: Sequence[Tensor], draws: Sequence[Tensor]
    ) -> Sequence[tuple[TrainingReport | Exception, Tensor, Tensor]]:
        from befit.train.fleet import train_together

        return train_together([self, *others], starts, draws)

    def run(self, optimisers: Sequence[torch.optim.Optimizer], learner: Learner) -> list[Tensor]:
        """Take all steps of all passes; the sum of each pass's task losses."""
        model, budget = self.model, self.site.budget

        def step(index: int, batch: Any) -> Tensor:
            current = self.passes[index]
            with model.active(*current.active, mixer=current.mixer), model.trainable(current.reached):
                model.zero_gradients()
                loss = learner.backward(index, batch)
            if budget.grad_clip:
                learner.clip(current.trainable, budget.grad_clip)
            optimisers[index].step()
            return loss

        totals: list[Tensor] = []
        everything = list(range(len(self.passes)))
        with model.training(True), model.dropping(self.dropout):
            for together in ([index] for index in everything) if self.in_sequence else (everything,):
                for number, batch in enumerate(learner.batches()):
                    rate = learning_rate(budget, number, self.at)
                    for index in together:
                        set_rate(optimisers[index], rate)
                        loss = learner.take(step, index, batch)
                        learner.stepped(index, number)
                        if index == len(totals):
                            totals.append(torch.zeros_like(loss))
                        totals[index] += loss
        return totals or [torch.zeros((), device=model.device) for _ in self.passes]

    def report(self, totals: Sequence[float], moments: State) -> TrainingReport:
        """Raises TrainingDiverged unless all means are finite."""
        if self.site.mechanism is not None:
            return TrainingReport(self.steps, {}, moments)
        losses = {current.name: total / max(1, self.steps) for current, total in zip(self.passes, totals, strict=True)}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise TrainingDiverged(
                    f"the loss of pass {name!r} became {loss} within {self.steps} steps at learning rate "
                    f"{self.site.budget.lr}; try a smaller train.lr or set train.grad_clip"
                )
        return TrainingReport(self.steps, losses, moments)


class Learner(Protocol):
    """How a step's gradients come about: of one client, or of several with the model in lanes."""

    def batches(self) -> Iterator[Any]: ...

    def take(self, step: Callable[[int, Any], Tensor], index: int, batch: Any) -> Tensor:
        """Have `step(index, batch)` done; its loss."""
        ...

    def backward(self, index: int, batch: Any) -> Tensor:
        """Leave the gradients of pass `index` in the model; returns the detached task loss."""
        ...

    def clip(self, chosen: Selector, limit: float) -> None: ...

    def stepped(self, index: int, step: int) -> None:
        """Called once the optimiser has taken the step."""
        ...


class _Alone:
    """One client's gradients.

    captured  what replays its steps, where they are captured
    """

    def __init__(self, asked: Training, captured: Steps | None) -> None:
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
    once, see `befit.train.fleet`."""
    now = tuple(current for current in passes if current.first_round <= at.round)
    if (ratio := site.budget.loraplus_ratio) != 1:
        now = tuple(replace(current, rates=(*current.rates, (factor("B"), ratio))) for current in now)
    strengths = tuple(current.blend.strength(site, at) if current.blend else None for current in now)
    count = site.budget.max_steps if steps is None else steps
    dropout = site.model.dropout
    return (yield Training(site, now, strengths, at, count, memory or Payload(), split, in_sequence, dropout))


def objective(
    task: Tensor, guides: Sequence[Guide], beta: float | Tensor | None, batch: Batch, logits: Tensor
) -> Tensor:
    """`task + sum of terms`, or `(1 - beta) task + beta * sum of terms`; with a beta of 0 the task's loss itself."""
    if not isinstance(beta, Tensor) and beta == 0:
        return task
    weighed = task if beta is None else (1 - beta) * task
    for guide in guides:
        term = guide(batch, logits)
        weighed = weighed + (term if beta is None else beta * term)
    return weighed
