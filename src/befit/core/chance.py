"""Random numbers that nobody can foresee, or take away again, without a key."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


class Chance:
    """Random numbers that nobody can foresee without the key: SHAKE-256 of the key and a counter."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def uniform(self, count: int) -> Tensor:
        """(count,) float64, above 0 and at most 1."""
        block = hashlib.shake_256(self._key + self._count.to_bytes(8, "big")).digest(8 * count)
        self._count += 1
        words = torch.frombuffer(bytearray(block), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)
        return ((words >> 11) + 2**52 + 1).double() / 2**53

    def normal(self, count: int) -> Tensor:
        """(count,) float32 from the standard normal distribution (Box and Muller 1958)."""
        half = (count + 1) // 2
        radius = self.uniform(half).log_().mul_(-2).sqrt_()
        angle = self.uniform(half).mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float()
