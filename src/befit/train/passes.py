"""A pass: what one optimiser trains, with which slots, and what guides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from befit.adapters.keys import NOTHING, Selector, need_selectors, slot
from befit.adapters.mixers import ByInput, Mix, forward_passes
from befit.core.names import several
from befit.protocol.work import Work
from befit.tasks.base import Batch
from befit.train.blend import Blend, Fixed
from befit.train.terms import Guide, Laned, Term


class Stateful:
    """An `after` that changes from step to step. Its attributes, which hold nothing of the model, are put back where
    clients that could not train as one are tried again."""


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
    blend: Blend | Fixed | None = None
    rates: tuple[tuple[Selector, float], ...] = ()
    after: Callable[[int, Mapping[str, Tensor]], None] | None = None
    beside: Selector = NOTHING

    def __post_init__(self) -> None:
        several(active=self.active)
        need_selectors(trainable=self.trainable)

    @property
    def reached(self) -> Selector:
        """What gets gradients."""
        return self.trainable if self.beside == NOTHING else self.trainable | self.beside

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that it names: the active ones, and those of its terms."""
        return (*self.active, *(name for term in self.terms for name in getattr(term, "slots", ())))

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
        trained = [self.trainable if len(together) == 1 else self.trainable & slot(*slots) for slots in together]
        return (
            *(Work(slots, chosen) for slots, chosen in zip(together, trained, strict=True)),
            *(work for term in self.terms for work in getattr(term, "work", ())),
        )


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
