"""How alike the layers of two models are: linear centred kernel alignment (Kornblith et al. 2019).

`CKA(X, Y) = ||Yc^T Xc||_F^2 / (||Xc^T Xc||_F ||Yc^T Yc||_F)` on hidden states X (n, d_x) and Y (n, d_y) of the same n
tokens, in the feature form: no n x n matrix. Specification fedmosaic.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from befit.align.tokens import matched_rows, pool
from befit.errors import DataError
from befit.site import Backbone
from befit.tasks.base import Batch, Examples

__all__ = ["layer_cka", "linear_cka"]

IGNORED = -100


def linear_cka(X: Tensor, Y: Tensor) -> float:
    """In [0, 1], 1 for the same up to rotation and scale, 0 where one of them never varies; float64."""
    X, Y = (Z.double() - Z.double().mean(0) for Z in (X, Y))
    common = (Y.T @ X).square().sum()
    scale = (X.T @ X).norm() * (Y.T @ Y).norm()
    return float(common / scale) if scale > 0 else 0.0


def layer_cka(
    first: Backbone, second: Backbone, examples: tuple[Examples, Examples], *, samples: int = 500, batch_size: int = 8,
    tokens: int = 4000, seed: int = 0,
) -> Tensor:  # fmt: skip
    """CKA of all pairs of layers of two bare models, (L_1 + 1, L_2 + 1) float64, the embedding's output first.

    examples  the same records in the terms of either model
    samples   how many of them, drawn by the seed; `tokens` bounds how many of their tokens are compared

    At the tokens of the answers where the task has answers, at all that are not padding elsewhere. Holds `tokens`
    hidden states of all layers of both. Raises DataError for fewer than two tokens.
    """
    if len(examples[0]) != len(examples[1]):
        raise DataError(f"comparing layers needs the same records for both models; there are {len(examples[0])} and "
                        f"{len(examples[1])}")  # fmt: skip
    order = torch.randperm(len(examples[0]), generator=torch.Generator().manual_seed(seed))[:samples]
    parts: list[tuple[list[Tensor], list[Tensor]]] = []
    count = 0
    for indices in order.split(batch_size):
        if count >= tokens or not len(indices):
            break
        batches = examples[0].batch(indices), examples[1].batch(indices)
        rows = matched_rows(batches, (first.task, second.task))
        rows = _of_answers(rows, batches[0]) if rows[0] else rows
        if rows[0] or "input_ids" not in batches[0]:
            states = [
                _layers(one, batch, groups) for one, batch, groups in zip((first, second), batches, rows, strict=True)
            ]
            parts.append((states[0], states[1]))
            count += len(states[0][0])
    if count < 2:
        raise DataError(f"comparing layers needs at least two tokens, there are {count}; give more records")
    layers = [
        [torch.cat(pieces)[:tokens] for pieces in zip(*(part[side] for part in parts), strict=True)] for side in (0, 1)
    ]
    return torch.tensor([[linear_cka(X, Y) for Y in layers[1]] for X in layers[0]], dtype=torch.float64)


def _of_answers(rows: tuple[list[list[int]], list[list[int]]], batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    """The groups whose token in the first model the loss asks about; all of them where nothing says so."""
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape:
        return rows
    learnt = (labels != IGNORED).flatten().tolist()
    kept = [place for place, group in enumerate(rows[0]) if learnt[group[0]]]
    return [rows[0][place] for place in kept], [rows[1][place] for place in kept]


@torch.no_grad()
def _layers(one: Backbone, batch: Batch, groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states (n, d) after the embedding and after every block, of one forward pass without adapters."""
    model = one.model
    with model.training(False), model.active(), _hidden_states(model.backbone) as found:
        one.task.logits(model.backbone, {name: value.to(model.device) for name, value in batch.items()})
    return [pool(hidden, groups).float().cpu() for hidden in found[0]]


@contextmanager
def _hidden_states(backbone: nn.Module) -> Iterator[list[tuple[Tensor, ...]]]:
    found: list[tuple[Tensor, ...]] = []

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_hidden_states": True}

    handles = [
        backbone.register_forward_pre_hook(ask, with_kwargs=True),
        backbone.register_forward_hook(lambda module, args, output: found.append(output.hidden_states)),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
