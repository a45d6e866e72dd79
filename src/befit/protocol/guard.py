"""Every reply is checked before it reaches a method: only what was declared, in shape, finite and of sane size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from befit.adapters.state import norm
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, State, TensorSpec, Update

_WEIGHTS = 0.02  # root mean square at which transformers start their weights


@dataclass(frozen=True)
class Guard:
    """Limits on a reply.

    max_norm_ratio  its norm over the larger of the norms of what the client was sent and of the initial adapters
    max_bytes       its size on the wire; None for no limit
    """

    max_norm_ratio: float = 100.0
    max_bytes: int | None = None

    def check(
        self, update: Update, declared: Mapping[str, TensorSpec], numbers: Collection[str], reference: float
    ) -> None:
        """Raise PayloadMismatch, with the reason, for a reply that must not reach the method.

        declared, numbers  names of the arrays, with their shape and dtype, and of the plain numbers
        reference          the larger of the two norms described above
        """
        client, arrays = update.client.id, update.payload.arrays
        check_declared(client, update.payload, declared, numbers)
        if self.max_bytes is not None and update.cost.bytes_up > self.max_bytes:
            raise PayloadMismatch(
                f"client {client} sent {update.cost.bytes_up} bytes; guard.max_bytes is {self.max_bytes}"
            )
        size = norm(arrays)
        if size > self.max_norm_ratio * reference:
            raise PayloadMismatch(
                f"client {client} sent arrays of norm {size:.3g}, more than {self.max_norm_ratio:g} "
                f"times the {reference:.3g} it started from (guard.max_norm_ratio)"
            )


def reference_norm(initial: State) -> float:
    """Norm of initial adapters. Differences of whole models all start at zero, and are measured by what weights of so
    many entries have."""
    return norm(initial) or _WEIGHTS * math.sqrt(sum(array.numel() for array in initial.values()))


def check_declared(client: str, payload: Payload, declared: Mapping[str, TensorSpec], numbers: Collection[str]) -> None:
    """Raise PayloadMismatch unless a reply is exactly what was declared: names, shapes, dtypes, all of it finite."""
    arrays = payload.arrays
    if missing := declared.keys() - arrays.keys():
        raise PayloadMismatch(f"client {client} left out {len(missing)} declared arrays, first {min(missing)!r}")
    if extra := arrays.keys() - declared.keys():
        raise PayloadMismatch(f"client {client} sent {len(extra)} undeclared arrays, first {min(extra)!r}")
    if different := payload.scalars.keys() ^ set(numbers):
        raise PayloadMismatch(
            f"client {client}: the plain number {min(different)!r} was sent and not declared, or declared and not sent"
        )
    for key, spec in declared.items():
        tensor = arrays[key]
        if tuple(tensor.shape) != spec.shape:
            raise PayloadMismatch(
                f"client {client} sent {key} with shape {tuple(tensor.shape)}; declared is {spec.shape}"
            )
        if str(tensor.dtype) != f"torch.{spec.dtype}":
            raise PayloadMismatch(f"client {client} sent {key} as {tensor.dtype}; declared is {spec.dtype}")
    check_finite(f"client {client} sent", payload)


def check_finite(what: str, payload: Payload) -> None:
    """Raise PayloadMismatch that names the first array or number that is not finite."""
    if not math.isfinite(norm(payload.arrays)):  # also where the squares of finite numbers overflow
        for key, tensor in payload.arrays.items():
            if not torch.isfinite(tensor).all():
                raise PayloadMismatch(f"{what} numbers that are not finite (first in {key})")
    for name, value in payload.scalars.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in values if isinstance(number, float)):
            raise PayloadMismatch(f"{what} a number that is not finite ({name})")
