"""Prepared examples in two shapes: stacked tensors, and token sequences that are padded batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from befit.tasks.base import Batch


@dataclass(frozen=True)
class StackedExamples:
    """Tensors that share their first axis, one row per example."""

    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        rows = torch.as_tensor(indices, dtype=torch.long)
        return {name: column[rows] for name, column in self.columns.items()}


@dataclass(frozen=True)
class PaddedExamples:
    """Token sequences, stored padded to the longest of the split and cut to the longest of each batch.

    sequences  (examples, longest) int32 each, padded on the right; batches hold int64
    lengths    (examples,) int64, the number of real tokens; the attention mask follows from it
    columns    what does not grow with the sequence, such as class labels
    prompts    causal LM only: the token ids of each prompt, for generation
    references causal LM only: the answers that count as right, as text
    options    causal LM only: the answers to choose from, where a metric needs them
    """

    sequences: Mapping[str, Tensor]
    lengths: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    prompts: Sequence[Sequence[int]] = ()
    references: Sequence[Sequence[str]] = ()
    options: Options | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        rows = torch.as_tensor(indices, dtype=torch.long)
        lengths = self.lengths[rows]
        width = int(lengths.max())
        batch = {name: tokens[:, :width][rows].long() for name, tokens in self.sequences.items()}
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        for name, column in self.columns.items():
            batch[name] = column[rows]
        return batch


def pad_right(sequences: Sequence[Sequence[int]], value: int) -> Tensor:
    """(n, longest) int32, with `value` after the end of the shorter ones.

    >>> pad_right([[5], [6, 7]], 0).tolist()
    [[5, 0], [6, 7]]
    """
    padded = torch.full((len(sequences), max(map(len, sequences), default=0)), value, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
    return padded


def balanced(examples: Any) -> Any:
    """Classified examples, each with the `weights` n / (classes x n of its class); classes are those that there are.

    >>> balanced(StackedExamples({"labels": torch.tensor([0, 0, 0, 2])})).columns["weights"].tolist()
    [0.6666666865348816, 0.6666666865348816, 0.6666666865348816, 2.0]
    """
    labels = examples.columns["labels"]
    _, places, counts = labels.unique(return_inverse=True, return_counts=True)
    weights = len(labels) / (len(counts) * counts.float())
    return replace(examples, columns={**examples.columns, "weights": weights[places]})


@dataclass(frozen=True)
class Options:
    """The answers to choose from, of all records of a split, one after another.

    examples  a prompt and one answer each; only the answer's tokens are judged, without an end token
    texts     the answers of each record
    names     how a generated answer names each of them
    right     which of them is the expected one, counted from 0
    """

    examples: PaddedExamples
    texts: Sequence[Sequence[str]]
    right: Sequence[int]
    names: Sequence[Sequence[str]] = ()
