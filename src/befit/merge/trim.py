"""Which entries of a client's update are large enough to stay: exact counts, over one tensor or over a whole adapter.

A whole adapter need not be in memory: the k-th largest magnitude of a stream of tensors is found digit by digit, in
one pass over the stream for every 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

_DIGIT = 16
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def share_of(share: float, size: int) -> int:
    """`floor(share * size)` with the share as the decimal it is written as, where binary numbers come to less.

    >>> share_of(0.29, 100), int(0.29 * 100)
    (29, 28)
    """
    return math.floor(Fraction(repr(share)) * size)


def kept_count(density: float, size: int, reference: bool = False) -> int:
    """`share_of`, and at least one.

    `reference` adds one, up to all: the count of the kthvalue rule in the public TIES and KnOTS code.

    >>> kept_count(0.29, 100), kept_count(0.001, 10), kept_count(0.3, 10, reference=True)
    (29, 1, 4)
    """
    count = share_of(density, size)
    return min(count + 1, size) if reference else max(1, count)


@dataclass(frozen=True)
class Cut:
    """Everything larger than `magnitude` stays, and the first `equal` entries that are just as large."""

    magnitude: float
    equal: int


def cut_of(values: Tensor, count: int) -> Cut:
    """The cut that keeps exactly `count` entries of one tensor."""
    magnitudes = values.detach().abs().flatten().cpu()
    numbers = (magnitudes.float() if magnitudes.dtype == torch.bfloat16 else magnitudes).numpy()
    # numpy's partition is vectorised: some thirty times faster than torch.kthvalue.
    smallest = float(np.partition(numbers, len(numbers) - count)[len(numbers) - count])
    return Cut(smallest, count - int((magnitudes > smallest).sum()))


def trim(values: Tensor, cut: Cut) -> tuple[Tensor, Cut]:
    """`values` with what is below the cut set to zero, and the cut for the next tensor of the same adapter."""
    level = values.abs() == cut.magnitude
    equal = int(level.sum())
    below = torch.nextafter(torch.tensor(cut.magnitude, dtype=values.dtype), torch.zeros((), dtype=values.dtype))
    kept = torch.nn.functional.hardshrink(values, float(below))
    if equal > cut.equal:
        surplus = level.flatten().nonzero().flatten()[cut.equal :]
        kept = kept.contiguous()  # of a tensor that is a part of another one it is not yet
        kept.view(-1)[surplus] = 0
    return kept, Cut(cut.magnitude, max(0, cut.equal - equal))


def cuts_of_stream(
    parts: Callable[[], Iterable[Sequence[Tensor]]], density: float, reference: bool = False
) -> list[Cut]:
    """The cuts for every client over all tensors of its adapter; `parts` starts a pass over lists of K tensors.

    All tensors must have one floating-point type. Memory: 2^16 counts a client. Passes: bits of the type over 16.
    Deviation: `reference` keeps all entries of the smallest magnitude, as the public code does.
    """
    searches: list[_Search] = []
    for tensors in parts():
        searches = searches or [_Search(tensor.dtype) for tensor in tensors]
        for search, tensor in zip(searches, tensors, strict=True):
            search.count(tensor)
    for search in searches:
        search.descend(kept_count(density, int(search.counts.sum()), reference))
    while searches and searches[0].shift:
        for tensors in parts():
            for search, tensor in zip(searches, tensors, strict=True):
                search.count(tensor)
        for search in searches:
            search.descend(search.remaining)
    return [search.cut(reference) for search in searches]


def passes_of(dtype: torch.dtype) -> int:
    """How many passes over a stream of this type find its cuts.

    >>> passes_of(torch.float32)
    2
    """
    return 8 * dtype.itemsize // _DIGIT


class _Search:
    """The search of one client: the digits found so far, and how many of the entries with these digits stay."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shift = 8 * dtype.itemsize  # bits below those that are fixed
        self.prefix = 0
        self.remaining = 0
        self.counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)

    def count(self, tensor: Tensor) -> None:
        # A magnitude's bits order as its values do, since the sign bit is zero.
        patterns = tensor.abs().flatten().view(_INTEGER[self.dtype.itemsize])
        if self.shift < 8 * self.dtype.itemsize:
            patterns = patterns[patterns >> self.shift == self.prefix]
        digits = (patterns >> (self.shift - _DIGIT)) & ((1 << _DIGIT) - 1)
        self.counts += torch.bincount(digits.int(), minlength=1 << _DIGIT)

    def descend(self, rank: int) -> None:
        """Fix the digit of the entry that is number `rank` from the top."""
        if not self.counts.any():  # an adapter without entries, in a basis of rank 0
            self.shift -= _DIGIT
            return
        above = self.counts.flip(0).cumsum(0).flip(0)  # entries with this digit or a larger one
        digit = int((above >= rank).nonzero()[-1])
        self.prefix = self.prefix << _DIGIT | digit
        self.shift -= _DIGIT
        self.remaining = rank - int(above[digit] - self.counts[digit])
        self.counts = torch.zeros_like(self.counts)

    def cut(self, reference: bool) -> Cut:
        magnitude = torch.tensor([self.prefix], dtype=_INTEGER[self.dtype.itemsize]).view(self.dtype)
        return Cut(float(magnitude), 1 << 62 if reference else self.remaining)
