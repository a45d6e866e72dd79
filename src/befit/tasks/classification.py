"""What image and text classification share: labels, cross-entropy, accuracy, and probabilities by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.core.errors import DataError, did_you_mean
from befit.core.metrics import LOWER_IS_BETTER
from befit.tasks.base import (
    ANSWER,
    LABEL,
    Batch,
    Examples,
    Record,
    Reduction,
    Task,
    by_value,
    draw,
    model_device,
    record_name,
    scored,
)
from befit.tasks.class_metrics import class_scores


def class_index(label: Any, label_names: Sequence[str], where: str) -> int:
    """The class of a record's label, given as index or as name. Raises DataError for anything else.

    >>> class_index("dog", ["cat", "dog"], "record 3"), class_index(0, ["cat", "dog"], "record 3")
    (1, 0)
    """
    if isinstance(label, str):
        if label not in label_names:
            raise DataError(
                f"{where}: label {label!r} is not one of {', '.join(label_names)}.{did_you_mean(label, label_names)}"
            )
        return list(label_names).index(label)
    # A bool is an int in Python, but True is no class; numpy integers pass through __index__.
    if isinstance(label, bool) or not hasattr(label, "__index__"):
        raise DataError(f"{where}: the label must be a class index or name, got {label!r}")
    index = label.__index__()
    if not 0 <= index < len(label_names):
        raise DataError(f"{where}: label {index} is outside 0..{len(label_names) - 1} ({', '.join(label_names)})")
    return index


class Classification(Task):
    """Single-label classification; the loss is cross-entropy in float32, computed here rather than by the model."""

    metric = "accuracy"

    def __init__(self, label_names: Sequence[str], metrics: Sequence[str] = ()) -> None:
        self.label_names = tuple(label_names)
        self.metrics = tuple(metrics) or ("accuracy",)
        if metrics:
            self.metric = self.metrics[0]

    @abstractmethod
    def encode(self, records: Sequence[Record]) -> Examples:
        """Everything but the labels, which need not be there."""

    @abstractmethod
    def as_record(self, value: Any) -> Record:
        """An input of `predict` as a record without a label."""

    def labels(self, records: Sequence[Record]) -> Tensor:
        """(records,) int64. Raises DataError for a missing or unknown label."""
        indices = []
        for position, record in enumerate(records):
            where = record_name(record, position)
            if "label" not in record:
                raise DataError(f"{where} has no label; its fields are {', '.join(record) or 'none'}")
            indices.append(class_index(record["label"], self.label_names, where))
        return torch.tensor(indices, dtype=torch.long)

    def sample_losses(self, logits: Tensor, batch: Batch, reduction: Reduction = "mean") -> Tensor:
        """(batch,) cross-entropy; a sample has one term, so both reductions agree. Times `weights`, if any."""
        losses = F.cross_entropy(logits.float(), batch["labels"], reduction="none")
        return losses * batch["weights"] if "weights" in batch else losses

    def terms(self, batch: Batch) -> Tensor:
        return batch["weights"] if "weights" in batch else torch.ones(len(batch["labels"]))

    def judged(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits, torch.arange(len(logits), device=logits.device)

    def draw_labels(self, logits: Tensor, batch: Batch, generator: torch.Generator) -> Batch:
        return {**batch, "labels": draw(logits.detach(), generator)}

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        if "weights" in batch:
            return self.sample_losses(logits, batch).sum() / batch["weights"].sum()
        return F.cross_entropy(logits.float(), batch["labels"])

    def evaluate(
        self,
        model: nn.Module,
        examples: Examples,
        batch_size: int,
        device: torch.device | str,
        values: Sequence[str] = (),
    ) -> dict[str, float]:
        """`metrics`, see `class_scores` (ties go to the lower class), and `loss` (mean over examples); of single
        examples whether they are right, and their label and answer. Raises DataError where the examples have no first
        metric."""
        losses: list[float] = []

        def found(batch: Batch) -> tuple[Tensor, Tensor]:
            logits = self.logits(model, batch)
            losses.append(float(self.sample_losses(logits, batch).double().sum()))
            return logits, batch["labels"]

        logits, classes = scored(model, examples, batch_size, device, found)
        labels, loss = classes.numpy(), sum(losses)
        answers, probabilities = logits.argmax(-1).numpy(), logits.double().softmax(-1).numpy()
        better = [name for name in self.metrics if name not in LOWER_IS_BETTER]

        def measured(rows: list[int]) -> dict[str, float]:
            return class_scores(labels[rows], answers[rows], probabilities[rows], better)

        def single(row: int) -> dict[str, float]:
            label, answer = int(labels[row]), int(answers[row])
            return {"accuracy": float(label == answer), LABEL: label, ANSWER: answer}

        scores = class_scores(labels, answers, probabilities, self.metrics)
        if (first := self.metrics[0]) not in scores:
            raise DataError(f"{first} needs two classes, and all {len(examples)} examples are of one")
        return {**scores, "loss": loss / len(examples), **by_value(values, measured, single)}

    def predict(
        self, model: nn.Module, inputs: Sequence[Any], batch_size: int = 32, device: torch.device | str | None = None
    ) -> list[dict[str, Any]]:
        """`{"answer": name, "probabilities": {name: p}}` per input; the probabilities are in the order of classes."""
        if not len(inputs):
            return []
        examples = self.encode([self.as_record(value) for value in inputs])
        (rows,) = scored(
            model,
            examples,
            batch_size,
            device or model_device(model),
            lambda batch: (self.logits(model, batch).float().softmax(dim=-1),),
        )
        answers = []
        for row in rows.tolist():
            probabilities = dict(zip(self.label_names, row, strict=True))
            best = max(probabilities, key=lambda name: probabilities[name])
            answers.append({"answer": best, "probabilities": probabilities})
        return answers
