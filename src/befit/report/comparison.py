"""Who gained, over what, and whether the difference is more than the size of the test set allows to say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from befit.report.numbers import is_share, score_of

__all__ = [
    "BEST",
    "Gain",
    "baseline_labels",
    "compared_with",
    "gain_over",
    "gains_over",
    "mean_gain",
    "run_title",
    "standard_error",
]

Verdict = Literal["gain", "loss", "unclear"]
BEST = ""  # stands for each client's best baseline where a baseline's label is asked for


def run_title(label: str) -> str:
    """The method's name as its paper writes it; "fedit-2" is the second baseline of that method."""
    from befit.errors import ConfigError
    from befit.registry import get_method
    from befit.report.numbers import plain

    name, _, number = label.rpartition("-")
    for candidate, suffix in ((label, ""), (name, f" {number}") if number.isdigit() else (label, "")):
        try:
            return get_method(candidate).title + suffix
        except ConfigError:  # a method that is not registered here, such as a user's own
            continue
    return plain(label)


def baseline_labels(results: Mapping[str, Any]) -> list[str]:
    """Labels of the baselines in the order in which they were run; those found at any client where that is unknown."""
    labels = dict.fromkeys(results.get("baselines") or {})
    for row in results["clients"].values():
        labels |= dict.fromkeys(row.get("baselines") or {})
    return list(labels)


def compared_with(labels: Sequence[str]) -> list[str]:
    """The baselines that get a column of gains: the best where there are several, and training alone."""
    if len(labels) < 2:
        return list(labels)
    return [BEST, "local"] if "local" in labels else [BEST]


@dataclass(frozen=True)
class Gain:
    """By how much the method is better than something else; positive is better, whatever the metric.

    error  one standard error due to the number of test examples; None where the metric does not tell
    """

    value: float
    error: float | None

    @property
    def verdict(self) -> Verdict:
        """`unclear` within one standard error, and for no difference at all."""
        if abs(self.value) <= (self.error or 0.0):
            return "unclear"
        return "gain" if self.value > 0 else "loss"


def standard_error(first: float, second: float, examples: int, metric: str) -> float | None:
    """`sqrt(p (1 - p) / n)`, the standard error of a share p measured on n examples.

    p is the mean of the two scores with two successes and two failures added, and n grows by those four (Agresti and
    Coull 1998), so that a client with every example right is not taken for certain. For means of values between 0
    and 1 that are not all 0 or 1 it is an upper bound. None for other metrics, and without examples.
    """
    if not is_share(metric) or examples <= 0:
        return None
    share = ((first + second) / 2 * examples + 2) / (examples + 4)
    return math.sqrt(share * (1 - share) / (examples + 4))


def gain_over(results: Mapping[str, Any], row: Mapping[str, Any], baseline: str) -> Gain | None:
    """One client's gain over a baseline, or over its best one (BEST); None where either has no score."""
    metric, sign = results["metric"], 1 if results.get("higher_is_better", True) else -1
    others = row.get("baselines") or {}
    known = [s for s in (score_of(others, label) for label in ([baseline] if baseline else others)) if s is not None]
    mine = score_of(row, metric)
    if mine is None or not known:
        return None
    best = max(known, key=lambda score: sign * score)
    return Gain(sign * (mine - best), standard_error(mine, best, row.get("examples") or 0, metric))


def gains_over(results: Mapping[str, Any], baseline: str) -> dict[str, Gain]:
    """The gain of every client for which it is known."""
    found = {client: gain_over(results, row, baseline) for client, row in results["clients"].items()}
    return {client: gain for client, gain in found.items() if gain is not None}


def mean_gain(gains: Mapping[str, Gain]) -> Gain:
    """Mean over clients; its error is that of a mean of independent test sets, `sqrt(sum e_k^2) / K`."""
    errors = [gain.error for gain in gains.values() if gain.error is not None]
    value = math.fsum(gain.value for gain in gains.values()) / len(gains)
    if len(errors) < len(gains):
        return Gain(value, None)
    return Gain(value, math.sqrt(math.fsum(error**2 for error in errors)) / len(gains))
