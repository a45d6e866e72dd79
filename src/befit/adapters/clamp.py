"""Clamping that does not stop gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["clamp_through"]


class _ClampThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def clamp_through(value: Tensor, low: float, high: float) -> Tensor:
    """`min(max(value, low), high)` with the gradient of the identity, outside the bounds too (Lee et al. 2025, eq. 6).

    A straight-through estimator: an entry that is clamped still learns which way to go.

    >>> v = torch.tensor([-1.0, 0.5], requires_grad=True)
    >>> clamp_through(v, 0.0, 1.0).sum().backward()
    >>> v.grad
    tensor([1., 1.])
    """
    return _ClampThrough.apply(value, low, high)  # type: ignore[return-value]
