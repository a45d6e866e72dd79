"""Arithmetic on states. A state is a value: every function returns a new one and changes none.

All functions are strict: operands must have the same keys and shapes, or PayloadMismatch names the first difference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from befit.adapters.keys import to_slot
from befit.core.errors import PayloadMismatch
from befit.core.values import State, TensorSpec, dtype_name


def check_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str = "two states") -> None:
    """Raise PayloadMismatch unless both hold the same keys with the same shapes."""
    if missing := first.keys() ^ second.keys():
        raise PayloadMismatch(f"{what} differ in {len(missing)} keys, first {min(missing)!r}")
    for key, tensor in first.items():
        if tensor.shape != second[key].shape:
            raise PayloadMismatch(f"{what} differ in {key}: {tuple(tensor.shape)} and {tuple(second[key].shape)}")


def add(first: State, second: State) -> State:
    """`first + second`, key by key."""
    check_same(first, second)
    return {key: tensor + second[key] for key, tensor in first.items()}


def scale(state: State, by: float) -> State:
    """`by * state`, key by key."""
    return {key: tensor * by for key, tensor in state.items()}


def interpolate(first: State, second: State, weight: float) -> State:
    """`weight * first + (1 - weight) * second`, key by key; `weight` 1 and 0 return the operand bit for bit.

    >>> interpolate({"s/m/A": torch.tensor([4.0])}, {"s/m/A": torch.tensor([0.0])}, 0.25)
    {'s/m/A': tensor([1.])}
    """
    check_same(first, second)
    return {key: torch.lerp(second[key], tensor, weight) for key, tensor in first.items()}


def weighted_mean(states: Iterable[State], weights: Sequence[float]) -> State:
    """`sum_k p_k X_k` with `p = weights / sum(weights)`, accumulated in the order given, in float32 or better.

    Only one state is held at a time besides the sum, so `states` may read them from a disk one after the other. A
    single state, or the same state several times, comes back within one rounding of itself.
    """
    if not weights:
        raise ValueError("the mean of no states is undefined")
    total = float(sum(weights))
    if not (total > 0 and all(weight >= 0 for weight in weights)):
        raise ValueError(f"weights must be non-negative with a positive sum, got {list(weights)}")
    sums: State = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, weight in zip(states, weights, strict=True):
        if not dtypes:
            dtypes = {key: tensor.dtype for key, tensor in state.items()}
            sums = {key: torch.zeros_like(tensor, dtype=_accumulator(tensor)) for key, tensor in state.items()}
        check_same(sums, state, "states to average")
        if sums:
            torch._foreach_add_(
                list(sums.values()), [state[key].to(into.dtype) for key, into in sums.items()], alpha=weight / total
            )
    return {key: value.to(dtypes[key]) for key, value in sums.items()}


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def norm(state: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all entries of all tensors; 0 for an empty state. Integers are names, and have no size."""
    numbers = [tensor for tensor in state.values() if tensor.is_floating_point()]
    return float(norms(numbers).square().sum().sqrt()) if numbers else 0.0


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,) float64: the Euclidean norm of each tensor, computed in float32; there has to be at least one."""
    return torch.stack(torch._foreach_norm([tensor.float() for tensor in tensors])).double()


def cosine(first: State, second: State) -> float:
    """Cosine of the angle between two states as flat vectors, from -1 to 1; 0 where one of them is zero."""
    check_same(first, second)
    pairs = [(tensor.double(), second[key].double()) for key, tensor in first.items()]
    dot = sum(float((one * other).sum()) for one, other in pairs)
    lengths = [math.sqrt(sum(float(of.square().sum()) for of in state)) for state in zip(*pairs, strict=True)]
    length = math.prod(lengths)
    return max(-1.0, min(1.0, dot / length)) if length > 0 else 0.0


def cut(block: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """The arrays that lie side by side in a block of memory, as views of it."""
    # "Unsafe" are the views of a split for who writes to one and differentiates another; they may be written to.
    parts = block.unsafe_split_with_sizes(list(map(math.prod, shapes.values())))
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def rename(state: State, slot: str) -> State:
    """The same arrays under another slot."""
    return {to_slot(key, slot): tensor for key, tensor in state.items()}


def specs_of(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for key, t in state.items()}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over keys (without their slot), shapes, types and bytes: equal for equal adapters in any slot."""
    digest = hashlib.sha256()
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f"{to_slot(key, '')} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_Spec = tuple[str, torch.dtype, torch.Size]
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PackedState:
    """A copy of a state at rest: all arrays of one type in one block of memory.

    names   of the arrays, in the order that they had
    shapes  for each block those of its arrays, as they lie in it

    Hundreds of small tensors per client cost more in objects than in numbers, and small blocks among short-lived ones
    keep an allocator from giving memory back.
    """

    blocks: tuple[Tensor, ...]
    names: tuple[str, ...]
    shapes: tuple[_Shapes, ...]

    @classmethod
    def of(cls, state: State) -> PackedState:
        shapes = _by_type(tuple((key, tensor.dtype, tensor.shape) for key, tensor in state.items()))
        blocks = (_side_by_side([state[key] for key in of_type]) for of_type in shapes)
        return cls(tuple(blocks), tuple(state), shapes)

    def unpack(self) -> State:
        """The arrays, as views of the blocks, in the order they had."""
        arrays: State = {}
        for block, shapes in zip(self.blocks, self.shapes, strict=True):
            arrays |= cut(block, shapes)
        return {name: arrays[name] for name in self.names}


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """A copy of all their entries, one tensor after the other."""
    if len(tensors) == 1:  # which PyTorch would not copy
        return tensors[0].detach().clone(memory_format=torch.contiguous_format).view(-1)
    return _flatten_dense_tensors(tensors).detach()


@lru_cache(maxsize=64)
def _by_type(specs: tuple[_Spec, ...]) -> tuple[_Shapes, ...]:
    """Kept for reuse, so that clients of one kind share their description."""
    shapes: dict[torch.dtype, _Shapes] = {}
    for key, dtype, shape in specs:
        shapes.setdefault(dtype, {})[key] = tuple(shape)
    return tuple(shapes.values())
