"""One client's training as a value: what it asks for, the steps that it comes to, and what they report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from befit.adapters.keys import Selector
from befit.core.errors import TrainingDiverged
from befit.core.values import Payload, State, Tick
from befit.train.optim import MOMENTS, learning_rate, make_optimiser, set_rate
from befit.train.passes import Pass

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site


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
class Request:
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


class OfOneClient:
    """What every learner of one client does the same."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def clip(self, chosen: Selector, limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._request.model.parameters(chosen), limit)

    def stepped(self, index: int, step: int) -> None:
        current = self._request.passes[index]
        if current.after is not None:
            current.after(step, self._request.model.leaves(current.reached))
