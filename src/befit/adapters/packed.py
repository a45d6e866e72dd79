"""States at rest: all arrays of one type in one block of memory.

Hundreds of small tensors per client cost more in objects than in numbers, and small blocks among short-lived ones keep
an allocator from giving memory back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from befit.core.values import State

__all__ = ["PackedState"]

_Spec = tuple[str, torch.dtype, torch.Size]


@dataclass(frozen=True, slots=True)
class PackedState:
    """A copy of a state. `places` says for each array in which block it lies, from where on, and its shape."""

    blocks: tuple[Tensor, ...]
    places: tuple[tuple[str, int, int, torch.Size], ...]

    @classmethod
    def of(cls, state: State) -> PackedState:
        dtypes, places = _arrange(tuple((key, tensor.dtype, tensor.shape) for key, tensor in state.items()))
        parts = [[t.detach().reshape(-1) for t in state.values() if t.dtype == dtype] for dtype in dtypes]
        return cls(tuple(map(torch.cat, parts)), places)

    def unpack(self) -> State:
        """The arrays, as views of the blocks, in the order they had."""
        return {
            key: self.blocks[block][start : start + shape.numel()].view(shape)
            for key, block, start, shape in self.places
        }


@lru_cache(maxsize=64)
def _arrange(specs: tuple[_Spec, ...]) -> tuple[list[torch.dtype], tuple[tuple[str, int, int, torch.Size], ...]]:
    """Kept for reuse, so that clients of one kind share their description."""
    dtypes = list(dict.fromkeys(dtype for _, dtype, _ in specs))
    ends = dict.fromkeys(dtypes, 0)
    places = []
    for key, dtype, shape in specs:
        places.append((key, dtypes.index(dtype), ends[dtype], shape))
        ends[dtype] += shape.numel()
    return dtypes, tuple(places)
