"""Rows of `W X`, made for a block of clients at a time when the first of them is asked for.

All mixtures at once would be another copy of all adapters, in memory and in every checkpoint. The server keeps the
weights instead, and clients ask in their order: each block is one matrix product, made once, and forgotten when two
later ones have been made, or the stack is gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from befit.methods.parts.mosaic.relevance import mixtures

__all__ = ["ROWS", "mixture"]

ROWS = 64  # clients in a block: enough for a matrix product to be limited by arithmetic, not by reading X
_KEPT = 2


@dataclass
class _Made:
    """The last blocks of one stack, by their first row, and the weights that they are of."""

    weights: weakref.ref[Tensor]
    blocks: dict[int, Tensor] = field(default_factory=dict)


_MADE: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mixture(weights: Tensor, stack: Tensor, row: int) -> Tensor:
    """`G_i = sum_j W_ij X_j` of one client: (…) from W (M, M) and X (M, …), float32.

    The same to the bit whoever was asked for before: a row is always computed together with its block. Neither argument
    may be changed in place. Holds at most 128 rows of a stack beside it.
    """
    made: _Made | None = _MADE.get(stack)
    if made is None or made.weights() is not weights:
        made = _MADE[stack] = _Made(weakref.ref(weights))
    start = row - row % ROWS
    block = made.blocks.get(start)
    if block is None:
        block = mixtures(weights[start : start + ROWS], stack)
        made.blocks[start] = block
        for first in list(made.blocks)[:-_KEPT]:
            made.blocks.pop(first, None)
    return block[row - start]
