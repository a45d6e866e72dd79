"""One adapter that learns from targets instead of labels; several may share a backbone, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.keys import slot
from befit.core.errors import TrainingDiverged
from befit.core.seeds import seed_draws
from befit.core.values import State, Tick
from befit.methods.parts.distil.translate import View
from befit.tasks.base import to_device
from befit.train.optim import make_optimiser

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.settings import TrainSettings
    from befit.tasks.base import Examples, Task


class ModelAndTask(Protocol):
    """A model and the task in its terms: a client's site, or a backbone at the server."""

    @property
    def model(self) -> AdaptedModel: ...

    @property
    def task(self) -> Task: ...


def view(model_and_task: ModelAndTask, examples: Examples, places: Sequence[int] | Tensor) -> View:
    """Some records as the model sees them, on its device."""
    return View(model_and_task.task, to_device(examples.batch(places), model_and_task.model.device))


def forward_rows(model_and_task: ModelAndTask, seen: View) -> Tensor:
    """(rows, classes) float32: the logits that the task judges, by one forward pass of the model as it is."""
    task = model_and_task.task
    rows, _ = task.judged(task.logits(model_and_task.model.backbone, seen.batch), seen.batch)
    return rows.float()


def soft_loss(target: Tensor, rows: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over rows of `KL(target || softmax(rows / T))`, without the factor T^2.

    target  (rows, classes), rows that sum to 1, made at the same temperature; its gradient is that of cross-entropy

    >>> float(soft_loss(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)).exp().round(decimals=4))
    2.0
    """
    return F.kl_div((rows / temperature).log_softmax(-1), target, reduction="batchmean")


class Student:
    """An adapter in training: its values between steps, and its optimiser.

    start  where it starts, all arrays of one slot
    rate   its learning rate

    The model is free between two steps, so that students of one backbone can take turns.
    """

    def __init__(self, model_and_task: ModelAndTask, start: State, budget: TrainSettings, rate: float) -> None:
        self._model_and_task, self._budget = model_and_task, budget
        self._chosen = slot(next(iter(start)).partition("/")[0])
        self.start, self.state, self.losses = start, start, list[float]()
        self._optimiser = make_optimiser(model_and_task.model.parameters(self._chosen), budget)
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    @property
    def slot(self) -> str:
        return next(iter(self.start)).partition("/")[0]

    def step(self, seen: View, loss: Callable[[Tensor], Tensor]) -> None:
        """One step on a loss of the rows of these records, and none where they have no row, as prompts that fill the
        model. Raises TrainingDiverged where the loss is not finite."""
        model = self._model_and_task.model
        model.load(self.state)
        with model.training(True), model.active(self.slot), model.trainable(self._chosen):
            rows = forward_rows(self._model_and_task, seen)
            if not len(rows):
                return
            value = loss(rows)
            model.zero_gradients()
            value.backward()
        if self._budget.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(self._chosen), self._budget.grad_clip)
        self._optimiser.step()
        self.state = model.dump(self._chosen)
        self.losses.append(float(value.detach()))
        if not math.isfinite(self.losses[-1]):
            raise TrainingDiverged(
                f"the loss of distillation became {self.losses[-1]} in step {len(self.losses)}; try a smaller distil.lr"
            )


@contextmanager
def seeded_dropout(model_and_task: ModelAndTask, at: Tick, who: str) -> Iterator[None]:
    """Within it, dropout is drawn by a seed of this round and of who learns; random states outside stay as they are."""
    device = model_and_task.model.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        seed_draws(at.seed_for(who, "dropout of distillation"), device)
        yield
