"""What cannot be asked of relevance-guided aggregation."""

from __future__ import annotations

__all__ = ["relevance_problems"]


def relevance_problems(
    temperature: float, every: int, ema: float, noise: float, share: float, similarity: str, mask: str
) -> list[str]:
    """Each problem with the key that it is about."""
    problems = []
    if not temperature > 0:
        problems.append(f"temperature: must be positive, got {temperature}")
    if every < 1:
        problems.append(f"every: must be at least 1, got {every}")
    if not 0 < ema <= 1:
        problems.append(f"ema: must be above 0 and at most 1, got {ema}")
    if not 0 <= noise < float("inf"):
        problems.append(f"noise: must be zero or positive, got {noise}")
    if not 0 < share <= 1:
        problems.append(f"share: must be above 0 and at most 1, got {share}")
    if similarity == "colmean" and mask != "rows":
        problems.append("similarity: colmean compares columns, and a random mask leaves none; set mask: rows")
    return problems
