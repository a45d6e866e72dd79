"""What a model predicts for public records, as arrays that travel (FedMKT, Fan et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.layout import ModelShapes
from befit.core.errors import ModelError
from befit.core.values import State, TensorSpec, Tick, Update
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import ModelAndTask, Student, seeded_dropout, soft_loss, view
from befit.methods.parts.distil.translate import View, translate_rows
from befit.tasks.base import Examples

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings

OWN = ""
KNOWLEDGE = "knowledge"
LOSSES, VALUES, TOKENS = (f"{KNOWLEDGE}/public/{name}" for name in ("losses", "values", "tokens"))


@dataclass(frozen=True)
class Knowledge:
    """An array of the layout beside its slots, for `samples` public records.

    samples    how many records; a federation with fewer leaves the rest zero
    positions  of how many answer tokens, the first ones of each record; a classifier has one answer
    top        of how many of the likeliest classes, the probabilities sent; where a model has no more, all in order

    `losses` (samples,), `values` (samples, positions, classes sent), and their `tokens`, unless all classes are sent.
    """

    samples: int
    positions: int
    top: int

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        if not shapes.outputs:
            raise ModelError("predictions for public records need a model that tells its number of classes or tokens")
        places = (self.samples, self.positions if shapes.generates else 1, min(self.top, shapes.outputs))
        arrays = {LOSSES: TensorSpec((self.samples,)), VALUES: TensorSpec(places)}
        return arrays | ({TOKENS: TensorSpec(places)} if self.top < shapes.outputs else {})


@torch.no_grad()
def predict_public(
    model_and_task: ModelAndTask, examples: Examples, chosen: Tensor, specs: Mapping[str, TensorSpec], batch_size: int
) -> State:
    """Losses and likeliest classes of the chosen records by the model as it is, in the shapes of `specs`, on the CPU.

    A record's loss is the mean over its answer tokens. Tokens are int32; probabilities beyond a record's last place are
    zero.
    """
    arrays = {key: torch.zeros(spec.shape) for key, spec in specs.items()}
    if TOKENS in arrays:
        arrays[TOKENS] = arrays[TOKENS].int()
    _, positions, classes = specs[VALUES].shape
    model, task = model_and_task.model, model_and_task.task
    with model.training(False):
        for first in range(0, len(chosen), batch_size):
            places = chosen[first : first + batch_size]
            seen = view(model_and_task, examples, places)
            logits = task.logits(model.backbone, seen.batch)
            arrays[LOSSES][first : first + len(places)] = task.sample_losses(logits, seen.batch).cpu()
            rows, samples = task.judged(logits, seen.batch)
            probabilities = rows.float().softmax(-1)
            for place in range(len(places)):
                of_record = probabilities[samples == place][:positions].cpu()
                if TOKENS in arrays:
                    best = of_record.topk(classes)
                    arrays[TOKENS][first + place, : len(of_record)] = best.indices.int()
                    of_record = best.values
                arrays[VALUES][first + place, : len(of_record)] = of_record
    return arrays


@dataclass(frozen=True)
class Lesson:
    """What one model predicts for one record: probabilities (positions, k), their classes, and its loss there."""

    family: str
    loss: float
    values: Tensor
    tokens: Tensor | None

    @classmethod
    def of(cls, family: str, arrays: Mapping[str, Tensor], place: int) -> Lesson:
        tokens = arrays[TOKENS][place] if TOKENS in arrays else None
        return cls(family, float(arrays[LOSSES][place]), arrays[VALUES][place], tokens)


def best_lessons(updates: Sequence[Update], count: int) -> list[Lesson]:
    """For each of the first `count` records, the prediction of the client with the lowest loss (the first of equals).

    One update is in memory at a time, and the predictions kept from earlier ones.
    """
    best: dict[int, Lesson] = {}
    for update in updates:
        arrays = update.payload.arrays
        for place, loss in enumerate(arrays[LOSSES][:count].tolist()):
            if place not in best or loss < best[place].loss:
                best[place] = Lesson.of(update.client.backbone, arrays, place)
    return [best[place] for place in range(count)]


def lower_loss_targets(lessons: Sequence[Lesson], losses: Tensor) -> dict[int, Lesson]:
    """Those lessons, by their number, whose loss is below the learner's own at the same record."""
    return {number: lesson for number, lesson in enumerate(lessons) if lesson.loss < float(losses[number])}


def distil_adapter(
    model_and_task: ModelAndTask,
    start: State,
    lessons: Mapping[int, Lesson],
    chosen: Tensor,
    seen_by: Callable[[str, Tensor], View],
    settings: Distillation,
    budget: TrainSettings,
    at: Tick,
    who: str,
) -> State:
    """The adapter after learning its lessons by cross-entropy at temperature 1; unchanged where there are none.

    lessons  by the number of the record among the `chosen` ones
    seen_by  records as a family sees them, by its name; as the learner does, by the name OWN
    """
    if not lessons:
        return start
    student = Student(model_and_task, start, budget, settings.rate(budget, at))
    with seeded_dropout(model_and_task, at, who):
        for numbers in settings.batches(torch.tensor(sorted(lessons)), at, who):
            batch = [(lessons[number], chosen[number : number + 1]) for number in numbers.tolist()]
            pairs = [(lesson, seen_by(OWN, place), seen_by(lesson.family, place)) for lesson, place in batch]
            student.step(
                seen_by(OWN, chosen[numbers]), lambda rows, pairs=pairs: soft_loss(target_of(pairs, rows), rows)
            )
    return student.state


def target_of(lessons: Sequence[tuple[Lesson, View, View]], rows: Tensor) -> Tensor:
    """(rows, classes) float32: lessons in the student's terms, record after record as in the batch of the rows.

    lessons  with the record as the student and as the lesson's own model see it
    """
    device, classes = rows.device, rows.shape[-1]
    return torch.cat(
        [
            translate_rows(
                lesson.values.to(device),
                None if lesson.tokens is None else lesson.tokens.to(device),
                teacher,
                student,
                classes,
            )
            for lesson, student, teacher in lessons
        ]
    )
