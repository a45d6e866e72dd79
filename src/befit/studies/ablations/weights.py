"""Grids of weights, and the weight that is best on one of them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["best_weight", "grid"]


def grid(step: float) -> list[float]:
    """Weights from 0 to 1, both included.

    >>> grid(0.25)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    count = round(1 / step)
    return [place / count for place in range(count + 1)]


def check_step(step: float) -> None:
    """Raise ValueError unless steps of this size lead from 0 to 1."""
    if not 0 < step <= 1 or abs(round(1 / step) * step - 1) > 1e-9:
        raise ValueError(f"step: must divide 1 into equal parts, such as 0.1 or 0.05, got {step}")


def best_weight(scores: Mapping[float, float]) -> float:
    """The weight with the best score; of equal ones that closest to one half, and then the smaller.

    Small splits have many ties, and the middle of them is the least extreme choice that they allow.

    >>> best_weight({0.0: 0.8, 0.5: 0.9, 1.0: 0.9})
    0.5
    """
    return max(scores, key=lambda w: (scores[w], -abs(w - 0.5), -w))
