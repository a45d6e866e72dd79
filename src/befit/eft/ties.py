"""Scales that are too close to each other to say anything: what tells them apart is the rounding of float32."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TIED", "spread"]

TIED = 1e-5  # relative; float32 rounds at 6e-8, files keep six digits, and sums over a network add to either


def spread(scales: Sequence[float]) -> float:
    """How far the largest scale is from the smallest, as a part of the largest; 0 for equal ones.

    >>> spread([2.0, 1.5, 1.0])
    0.5
    """
    most = max(scales)
    return (most - min(scales)) / most if most else 0.0
