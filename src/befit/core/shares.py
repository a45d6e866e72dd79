"""Shares of a whole number of things."""

from __future__ import annotations

import math


def rounded_up(share: float, count: int) -> int:
    """A share of so many, rounded up; what binary fractions add to it does not count.

    >>> rounded_up(0.55, 100), rounded_up(2 / 3, 3), rounded_up(0.5, 5), 0.55 * 100 > 55
    (55, 2, 3, True)
    """
    return math.ceil(share * count * (1 - 1e-12))
