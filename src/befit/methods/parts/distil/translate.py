"""What one model predicts for a record, in the terms of another (docs/methods/perada.md, Distillation).

A *row* is a place that a task judges: a sample of a classifier, or an answer token of a language model, predicted from
what stands before it. Models with one tokenizer have the same rows and classes. Between others, rows are matched by
the text of their tokens, and classes by theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from befit.core.errors import ModelError
from befit.core.values import IGNORED
from befit.methods.parts.mosaic.align.tokens import matched_answers, piece_of, tokenizer_of
from befit.tasks.base import Batch, Task


@dataclass(frozen=True)
class View:
    """Records as one model sees them."""

    task: Task
    batch: Batch

    @property
    def own(self) -> Tensor:
        """(rows,) int64: the right class of every row; for a language model the token that comes next."""
        labels = self.batch["labels"]
        if labels.ndim == 1:
            return labels
        return labels[:, 1:][labels[:, 1:] != IGNORED]


def same_rows(first: View, second: View) -> bool:
    """Whether rows and classes of both are the same: of classifiers always, else with one vocabulary and tokens."""
    left, right = first.batch["labels"], second.batch["labels"]
    if left.ndim == 1 and right.ndim == 1:
        return True
    return left.shape == right.shape and torch.equal(left, right) and _one_vocabulary(first.task, second.task)


def spread(values: Tensor, tokens: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    """(rows, classes) probabilities, and which rows have any, from `values` (rows, k) of the classes `tokens`.

    Without `tokens` the values are of all classes in order. Negative values and foreign classes count as nothing, and
    what is left of a row sums to 1.
    """
    values = values.float().clamp_min(0)
    if tokens is not None:
        named = tokens.long()
        in_range = (named >= 0) & (named < classes)
        values = values.new_zeros(len(values), classes).scatter_add(1, named * in_range, values * in_range)
    elif values.shape[1] != classes:
        raise ModelError(f"probabilities of {values.shape[1]} classes for a model that has {classes}")
    sums = values.sum(1, keepdim=True)
    return values / sums.clamp_min(torch.finfo(torch.float32).tiny), sums[:, 0] > 0


def translate_rows(values: Tensor, tokens: Tensor | None, teacher: View, student: View, classes: int) -> Tensor:
    """(student's rows, classes) float32: the teacher's probabilities there, each row summing to 1.

    values, tokens  the teacher's probabilities (rows, k) and their classes, see `spread`; fewer rows than there
                    are stand for the first ones

    Where one token of the teacher stands for the same text as one of the student's, its probabilities, by the text of
    each class; what has no such class is left out, and the rest sums to 1. Everywhere else the student's own token,
    the one that comes next.
    """
    own = student.own.to(values.device)
    target = torch.nn.functional.one_hot(own, classes).float()
    if same_rows(teacher, student):
        probabilities, used = spread(values[: len(own)], None if tokens is None else tokens[: len(own)], classes)
        places = used.nonzero()[:, 0]
        target[places] = probabilities[places]
        return target
    named = torch.arange(values.shape[1], device=values.device).expand_as(values) if tokens is None else tokens.long()
    table = _table(_Words(teacher.task), _Words(student.task)).to(values.device)
    inside = (named >= 0) & (named < len(table))
    probabilities, used = spread(values, torch.where(inside, table[named * inside], -1), classes)
    for teacher_row, student_row in _single_rows(teacher, student):
        if teacher_row < len(probabilities) and used[teacher_row]:
            target[student_row] = probabilities[teacher_row]
    return target


def _single_rows(teacher: View, student: View) -> list[tuple[int, int]]:
    """Rows of both whose tokens stand for the same text, one for one."""
    numbers = [_numbers(view.batch["labels"]) for view in (teacher, student)]
    pairs = []
    for record, (theirs, mine) in matched_answers((teacher.batch, student.batch), (teacher.task, student.task)):
        if len(theirs) == len(mine) == 1:
            pairs.append(tuple(int(rows[record, at]) for rows, at in zip(numbers, (theirs[0], mine[0]), strict=True)))
    return [pair for pair in pairs if min(pair) >= 0]


def _numbers(labels: Tensor) -> Tensor:
    """(batch, tokens) int64: the row that predicts a token, -1 where there is none."""
    predicted = labels != IGNORED
    predicted[:, 0] = False
    return torch.where(predicted, predicted.flatten().cumsum(0).view_as(labels) - 1, -1)


def _one_vocabulary(first: Task, second: Task) -> bool:
    left, right = tokenizer_of(first), tokenizer_of(second)
    return left is right or _same_words(left, right)


@lru_cache(maxsize=32)
def _same_words(first: Any, second: Any) -> bool:
    return first.get_vocab() == second.get_vocab()


@lru_cache(maxsize=16)
def _table(teacher: _Words, student: _Words) -> Tensor:
    """(teacher's tokens,) int64: the student's token with the same text, the end of a text for its end; else -1."""
    place = {text: token for token, text in reversed(list(enumerate(student.texts())))}
    place.pop("", None)
    table = torch.tensor([place.get(text, -1) for text in teacher.texts()])
    ends = [words.tokenizer.eos_token_id for words in (teacher, student)]
    if None not in ends:
        table[ends[0]] = ends[1]
    return table


class _Words:
    """A tokenizer's texts, hashed by the tokenizer."""

    def __init__(self, task: Task) -> None:
        self.task, self.tokenizer = task, tokenizer_of(task)

    def texts(self) -> list[str]:
        return [piece_of(self.task, token) for token in range(len(self.tokenizer))]

    def __hash__(self) -> int:
        return hash(id(self.tokenizer))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Words) and self.tokenizer is other.tokenizer
