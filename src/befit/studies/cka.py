"""How alike the layers of two models are: linear centred kernel alignment (Kornblith et al. 2019).

`CKA(X, Y) = ||Yc^T Xc||_F^2 / (||Xc^T Xc||_F ||Yc^T Yc||_F)` on hidden states X (n, d_x) and Y (n, d_y) of the same n
tokens, in the feature form: no n x n matrix. Kornblith et al. 2019; FedMosaic, Figures 4 and 11.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.adapters.instance import hidden_states
from befit.adapters.pq import placement
from befit.core.errors import DataError
from befit.core.values import IGNORED
from befit.methods.parts.mosaic.align.tokens import Pooling, matched_rows
from befit.protocol.site import Backbone
from befit.tasks.base import Batch, Examples, to_device

_LOG = logging.getLogger(__name__)
_SIDES = ("first.", "second.")
Rows = dict[str, Tensor]
"""By name of a layer, `first.0` and so on: hidden states (n, d)."""


@dataclass(frozen=True)
class LayerCka:
    """How alike the layers of two models are.

    values   (L_1 + 1, L_2 + 1) float64, in [0, 1]: row 0 is the embedding's output, row l that of block l - 1;
             the last one as the model's final norm leaves it, where there is one
    models   their names
    tokens   how many were compared, of so many `records`
    """

    values: Tensor
    models: tuple[str, str]
    tokens: int
    records: int

    def placed(self, blocks: int) -> list[dict[str, float]]:
        """Where PQ-LoRA in so many blocks would sit: by k, the block of either model, their CKA, and the block of the
        second that is most like the first's. Raises ModelError for more blocks than a model has."""
        depths = [count - 1 for count in self.values.shape]
        rows = []
        for first, second in zip(*(placement(blocks, depth) for depth in depths), strict=True):
            row = self.values[first + 1, 1:]
            rows.append(
                {
                    "first": first,
                    "second": second,
                    "cka": float(row[second]),
                    "nearest": int(row.argmax()),
                    "nearest_cka": float(row.max()),
                }
            )
        return rows


def layer_cka(
    first: Backbone,
    second: Backbone,
    examples: tuple[Examples, Examples],
    *,
    samples: int = 500,
    batch_size: int = 8,
    tokens: int = 4000,
    seed: int = 0,
    memory_mib: int = 1024,
    tell: Callable[[int, int], None] | None = None,
) -> LayerCka:
    """CKA of all pairs of layers of two bare models, the embedding's output first.

    examples    the same records in the terms of either model
    samples     how many of them, drawn by the seed; `tokens` bounds how many of their tokens are compared
    memory_mib  of the sums of products that are held at a time, besides one batch of hidden states
    tell        is called with how many passes over the records are done, and how many there will be

    At the tokens of the answers where the task has answers, at all that are not padding elsewhere. Sums of d_x d_y
    numbers for all pairs of layers can be too many at once: as many as fit are made in one pass over the records, and
    the records are gone through as often as it takes. Raises DataError for fewer than two tokens, or where the records
    are not the same.
    """
    if len(examples[0]) != len(examples[1]):
        raise DataError(
            f"comparing layers needs the same records for both models; there are {len(examples[0])} and "
            f"{len(examples[1])}"
        )
    order = torch.randperm(len(examples[0]), generator=torch.Generator().manual_seed(seed))[:samples]

    def batches() -> Iterator[Rows]:
        return _hidden_rows(first, second, examples, order.split(batch_size), tokens)

    widths = next(({name: X.shape[1] for name, X in rows.items()} for rows in batches()), {})
    norms: dict[tuple[str, str], float] = {}
    passes, count = _passes(widths, memory_mib * 2**20), 0
    for number, pairs in enumerate(passes):
        sums = CentredProducts(pairs)
        for rows in batches():
            sums.add(rows)
        norms |= {pair: sums.norm(*pair) for pair in pairs}
        count = sums.count
        if tell:
            tell(number + 1, len(passes))
    if count < 2:
        raise DataError(f"comparing layers needs at least two tokens, there are {count}; give more records")
    if count < (wide := max(widths.values())):
        _LOG.warning(
            "layers of up to %d dimensions are compared at %d tokens: with fewer tokens than dimensions all "
            "layers look alike; give more records, or allow more tokens",
            wide,
            count,
        )
    names = [[name for name in widths if name.startswith(side)] for side in _SIDES]
    values = [[_ratio(norms, x, y) for y in names[1]] for x in names[0]]
    return LayerCka(torch.tensor(values, dtype=torch.float64), (first.name, second.name), count, len(order))


def _passes(widths: Mapping[str, int], limit: int) -> list[list[tuple[str, str]]]:
    """All pairs that are needed, in groups whose sums fit into so many bytes; one pair at least."""
    sides = [[name for name in widths if name.startswith(side)] for side in _SIDES]
    needed = [(name, name) for name in widths] + [(x, y) for x in sides[0] for y in sides[1]]
    groups: list[list[tuple[str, str]]] = [[]]
    size_of_group = 0
    for pair in needed:
        size = 8 * widths[pair[0]] * widths[pair[1]]
        if groups[-1] and size_of_group + size > limit:
            groups.append([])
            size_of_group = 0
        groups[-1].append(pair)
        size_of_group += size
    return groups if needed else []


def _ratio(norms: Mapping[tuple[str, str], float], x: str, y: str) -> float:
    scale = norms[x, x] * norms[y, y]
    return norms[x, y] ** 2 / scale if scale > 0 else 0.0


def _hidden_rows(
    first: Backbone, second: Backbone, examples: tuple[Examples, Examples], order: Sequence[Tensor], tokens: int
) -> Iterator[Rows]:
    """Batch by batch, hidden states (n, d) of every layer of both models at the same tokens, `tokens` in all."""
    left = tokens
    for indices in order:
        if left < 1 or not len(indices):
            return
        batches = examples[0].batch(indices), examples[1].batch(indices)
        rows = matched_rows(batches, (first.task, second.task))
        rows = _of_answers(rows, batches[0]) if rows[0] else rows
        if not rows[0] and "input_ids" in batches[0]:
            continue
        hidden: Rows = {}
        for side, backbone, batch, groups in zip(_SIDES, (first, second), batches, rows, strict=True):
            hidden |= {f"{side}{number}": X[:left] for number, X in enumerate(_layers(backbone, batch, groups))}
        left -= len(next(iter(hidden.values())))
        yield hidden


def _of_answers(rows: tuple[list[list[int]], list[list[int]]], batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    """The groups whose token in the first model the loss asks about; all of them where nothing says so."""
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape:
        return rows
    learnt = (labels != IGNORED).flatten().tolist()
    kept = [place for place, group in enumerate(rows[0]) if learnt[group[0]]]
    return [rows[0][place] for place in kept], [rows[1][place] for place in kept]


@torch.no_grad()
def _layers(backbone: Backbone, batch: Batch, groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states (n, d) after the embedding and after every block, of one forward pass without adapters; after the
    last block as transformers gives them, which is after the final norm."""
    model = backbone.model
    with model.training(False), model.active(), hidden_states(model.backbone, tuple) as passes:
        backbone.task.logits(model.backbone, to_device(batch, model.device))
    return [Pooling(groups, hidden.device)(hidden).float().cpu() for hidden in passes[0]]


class CentredProducts:
    """`Xc^T Yc` of chosen pairs of named matrices X (n, d_x) and Y (n, d_y), from their rows, batch by batch.

    pairs  names (x, y); a name with itself gives its own `Xc^T Xc`

    Holds d_x d_y float64 numbers for every pair and no rows. Rows count from their first batch's mean, so that a
    common offset, which hidden states of language models have, costs no digits.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self._names = sorted({name for pair in pairs for name in pair})
        self._origin: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._products: dict[tuple[str, str], Tensor] = {}
        self.count = 0

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """One batch: for every name the same number of rows, at least one."""
        moved = {name: rows[name].double() for name in self._names}
        if not self._origin:
            self._origin = {name: X.mean(0) for name, X in moved.items()}
        moved = {name: X - self._origin[name] for name, X in moved.items()}
        self.count += len(next(iter(moved.values())))
        for name, X in moved.items():
            total = X.sum(0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for x, y in self._pairs:
            if (x, y) in self._products:
                self._products[x, y].addmm_(moved[x].T, moved[y])
            else:
                self._products[x, y] = moved[x].T @ moved[y]

    def norm(self, x: str, y: str) -> float:
        """`||Xc^T Yc||_F` over all rows so far."""
        product = self._products[x, y].addr(self._sums[x], self._sums[y], alpha=-1 / self.count)
        return float(product.norm())
