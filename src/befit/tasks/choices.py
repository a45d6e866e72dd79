"""Which of some given answers a language model finds most likely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from befit.core.errors import DataError
from befit.core.values import IGNORED
from befit.tasks.base import Batch, by_value, scored

if TYPE_CHECKING:
    from befit.tasks.base import Task
    from befit.tasks.examples import Options, PaddedExamples


def choice_metrics(
    task: Task,
    model: nn.Module,
    options: Options,
    metrics: Sequence[str],
    batch_size: int,
    device: torch.device | str,
    values: Sequence[str],
) -> dict[str, float]:
    """The share of records whose expected answer scores highest.

    choice_sum        score is log p(answer | prompt), the sum over its tokens
    choice_per_token  divided by the number of its tokens
    choice_per_char   divided by the number of its characters, which evaluation harnesses call normalised accuracy

    Ties go to the answer that comes first; `<metric>_ties` is the share of records with one, where there are any.

    values  one for every record, each of which is measured by itself too, see `befit.tasks.base.by_value`
    """
    sums, tokens = log_likelihoods(task, model, options.examples, batch_size, device)
    characters = torch.tensor([len(text) for texts in options.texts for text in texts])
    divisors = {"choice_sum": torch.ones_like(tokens), "choice_per_token": tokens, "choice_per_char": characters}
    counts = [len(texts) for texts in options.texts]
    measured: dict[str, float] = {}
    correct: dict[str, list[bool]] = {name: [] for name in metrics}
    for name in metrics:
        ties = 0
        for scores, right in zip((sums / divisors[name]).split(counts), options.right, strict=True):
            best = (scores == scores.max()).nonzero()[:, 0]
            correct[name].append(int(best[0]) == right)
            ties += len(best) > 1
        measured[name] = sum(correct[name]) / len(counts)
        if ties:
            measured[f"{name}_ties"] = ties / len(counts)
    return measured | by_value(
        values, lambda rows: {name: sum(right[row] for row in rows) / len(rows) for name, right in correct.items()}
    )


def log_likelihoods(
    task: Task, model: nn.Module, examples: PaddedExamples, batch_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(examples,) float64 and int64: the log-probability of every answer given its prompt, and its tokens."""

    def found(batch: Batch) -> tuple[Tensor, Tensor]:
        losses = task.sample_losses(task.logits(model, batch), batch, "sum")
        return -losses.double(), (batch["labels"][:, 1:] != IGNORED).sum(1)

    sums, tokens = scored(model, examples, batch_size, device, found)
    if not sums.isfinite().all():
        raise DataError("the model gives an answer a probability that is not a number")
    return sums, tokens
