"""Every reply is checked before it reaches a method: only what was declared, in shape, finite and of sane size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.adapters.state import norm
from befit.engine.wire import payload_bytes
from befit.errors import PayloadMismatch
from befit.types import TensorSpec, Update

__all__ = ["Guard", "check_names"]


@dataclass(frozen=True)
class Guard:
    """Limits on a reply.

    max_norm_ratio  its norm over the larger of the norms of what the client was sent and of the initial adapters
    max_bytes       its size on the wire; None for no limit
    """

    max_norm_ratio: float = 100.0
    max_bytes: int | None = None

    def check(self, update: Update, declared: Mapping[str, TensorSpec], reference: float) -> None:
        """Raise PayloadMismatch, with the reason, for a reply that must not reach the method.

        reference  the larger of the two norms described above
        """
        client, arrays = update.client.id, update.payload.arrays
        check_names(client, arrays, declared)
        for key, spec in declared.items():
            tensor = arrays[key]
            if tuple(tensor.shape) != spec.shape:
                raise PayloadMismatch(f"client {client} sent {key} with shape {tuple(tensor.shape)}; declared is "
                                      f"{spec.shape}")  # fmt: skip
            if str(tensor.dtype) != f"torch.{spec.dtype}":
                raise PayloadMismatch(f"client {client} sent {key} as {tensor.dtype}; declared is {spec.dtype}")
        if self.max_bytes is not None and (size := payload_bytes(update.payload)) > self.max_bytes:
            raise PayloadMismatch(f"client {client} sent {size} bytes; guard.max_bytes is {self.max_bytes}")
        if not arrays:
            return
        size = norm(arrays)
        if not math.isfinite(size):  # also for finite numbers whose squares overflow: those have too large a norm
            for key, tensor in arrays.items():
                if not torch.isfinite(tensor).all():
                    raise PayloadMismatch(f"client {client} sent numbers that are not finite (first in {key})")
        if size > self.max_norm_ratio * reference:
            raise PayloadMismatch(f"client {client} sent arrays of norm {size:.3g}, more than {self.max_norm_ratio:g} "
                                  f"times the {reference:.3g} it started from (guard.max_norm_ratio)")  # fmt: skip


def check_names(client: str, arrays: Mapping[str, Tensor], declared: Mapping[str, TensorSpec]) -> None:
    """Raise PayloadMismatch unless the names are exactly the declared ones."""
    if missing := declared.keys() - arrays.keys():
        raise PayloadMismatch(f"client {client} left out {len(missing)} declared arrays, first {min(missing)!r}")
    if extra := arrays.keys() - declared.keys():
        raise PayloadMismatch(f"client {client} sent {len(extra)} undeclared arrays, first {min(extra)!r}")
