"""How numbers over seeds are written in a comparison's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.report.numbers import NOTHING, gain_text

__all__ = ["difference_text", "p_text"]


def difference_text(t: Mapping[str, Any], metric: str) -> str:
    """A mean difference, with half of its interval where there is one; `t` as in compare.json.

    >>> difference_text({"mean": 0.02, "low": 0.01, "high": 0.03}, "accuracy")
    '+2.0 ± 1.0'
    """
    text = gain_text(t["mean"], metric)
    return text if t["low"] is None else f"{text} ± {gain_text(t['high'] - t['mean'], metric, signed=False)}"


def p_text(p: float | None) -> str:
    """
    >>> p_text(0.0421), p_text(0.00004), p_text(None)
    ('0.042', '4e-05', '–')
    """
    return NOTHING if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
