"""Arrays as whole numbers and back: what a client adds to a sum, and what a sum says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from befit.core.errors import ConfigError, NotFinite, PayloadMismatch
from befit.core.values import State, TensorSpec
from befit.protocol.secure.masks import Numbers, bytes_for
from befit.protocol.settings import SecureSums

_COUNTS = 2  # numbers behind those of the arrays: the weight, and whether the update was shortened


@dataclass(frozen=True)
class Summed:
    """What a sum of clients' vectors says.

    mean     of their updates, weighted, under the names of the arrays
    weight   the sum of their weights
    clipped  how many updates were shortened
    """

    mean: State
    weight: int
    clipped: int


@dataclass(frozen=True)
class FixedPoint:
    """How the arrays of `specs` become whole numbers, for a sum over so many clients.

    weighted  by numbers of examples, else all alike
    """

    settings: SecureSums
    specs: Mapping[str, TensorSpec]
    clients: int
    weighted: bool

    @property
    def step(self) -> float:
        return self.settings.clip * 2.0 ** (1 - self.settings.bits)

    @property
    def length(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs.values()) + _COUNTS

    @property
    def width(self) -> int:
        """Bytes of a number as it travels. Raises ConfigError where eight are too few."""
        most = self.settings.most_examples if self.weighted else 1
        if (width := bytes_for(self.settings.bits, self.clients * most)) > 8:
            raise ConfigError(
                [
                    f"federation.secure_sums.bits: {self.settings.bits} bits, most_examples {most} and {self.clients} "
                    "clients do not fit into sums of 64 bits; lower one of the first two"
                ]
            )
        return width

    def encode(self, update: State, examples: int) -> Numbers:
        """One client's vector: its update, shortened to the norm `clip` if it is longer, in steps, times its weight;
        then that weight and 1 if it was shortened. An entry is off by half a step at most."""
        flat = torch.cat([update[key].reshape(-1).double() for key in sorted(self.specs)])
        size, clip = float(flat.norm()), self.settings.clip  # in float64, so that no finite update overflows
        if not math.isfinite(size):
            raise NotFinite("the update has numbers that are not finite")
        weight = min(examples, self.settings.most_examples) if self.weighted else 1
        steps = torch.round(flat * (min(1.0, clip / size if size else 1.0) / self.step)).to(torch.int64)
        most = 2 ** (self.settings.bits - 1)  # which the rounding of the norm may miss by one
        whole = steps.clamp_(-most, most).mul_(weight).numpy()
        return np.concatenate([whole, [weight, int(size > clip)]]).astype(np.int64).view(np.uint64)

    def to_bytes(self, numbers: Numbers) -> torch.Tensor:
        """(length, width) of bytes: each number modulo 256^width."""
        whole = np.ascontiguousarray(numbers.astype("<u8", copy=False)).view(np.uint8).reshape(-1, 8)
        return torch.from_numpy(np.ascontiguousarray(whole[:, : self.width]))

    def from_bytes(self, sent: torch.Tensor) -> Numbers:
        whole = np.zeros((self.length, 8), np.uint8)
        whole[:, : self.width] = sent.numpy()
        return whole.reshape(-1).view("<u8").astype(np.uint64, copy=False)

    def decode(self, total: Numbers) -> Summed:
        """What the sum of vectors says. Raises PayloadMismatch for one that no clients could have made together."""
        signed = _signed(total, 8 * self.width)
        weight, clipped = int(signed[-2]), int(signed[-1])
        most, entries = 2 ** (self.settings.bits - 1) * weight, signed[:-_COUNTS]
        fits = max(int(entries.max(initial=0)), -int(entries.min(initial=0))) <= most
        if not (weight > 0 and 0 <= clipped <= self.clients and fits):
            raise PayloadMismatch(
                "the sum is none of updates within federation.secure_sums.clip: a client has sent a wrong vector, and "
                "a sum does not tell which one"
            )
        flat, mean, start = torch.from_numpy(entries * (self.step / weight)), dict[str, torch.Tensor](), 0
        for key in sorted(self.specs):
            shape = self.specs[key].shape
            mean[key] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return Summed(mean, weight, clipped)


def _signed(numbers: Numbers, bits: int) -> NDArray[np.int64]:
    """Numbers modulo 2^bits as those around zero."""
    shift = np.uint64(64 - bits)
    return (numbers << shift).view(np.int64) >> np.int64(64 - bits)
