"""Which client should get the larger of two models (FedMosaic, appendix A.3, Table 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from befit.core.errors import DataError

__all__ = ["ALONE", "gains", "model_choice", "scores_of_run"]

ALONE = "local"  # the method by which a client trains alone, the paper's SFT


def gains(small: Mapping[str, float], large: Mapping[str, float]) -> dict[str, float]:
    """What each client gains, alone, by the larger model: its score with that less its score with the smaller one.

    small, large  scores by client, after training alone with either model (`local`, the paper's SFT)
    Raises DataError unless both are finite and of the same clients.
    """
    if odd := sorted(small.keys() ^ large.keys()):
        raise DataError(f"client {odd[0]} was trained with one of the two models only; train all with both")
    if strange := [client for client in small if not math.isfinite(small[client] + large[client])]:
        raise DataError(f"client {strange[0]} has no score with one of the two models")
    return {client: large[client] - small[client] for client in small}


def model_choice(gained: Mapping[str, float], threshold: float = 2.0) -> dict[str, str]:
    """By client, "large" where it gains more than the threshold, else "small".

    gained     in the unit of the threshold: the default is two points of a hundred
    The paper gives the larger model where the gain is "significant" and states no threshold. Any from 1.70 to 2.85
    gives its choice on DRAKE; on HFLB none does, where a client that gains 1.62 has the small model and one that gains
    1.12 the large. Raises DataError for a threshold that is no number.

    >>> model_choice({"a": 1.7, "b": 2.85})
    {'a': 'small', 'b': 'large'}
    """
    if math.isnan(threshold):
        raise DataError("the threshold must be a number")
    return {client: "large" if gain > threshold else "small" for client, gain in gained.items()}


def scores_of_run(results: Mapping[str, Any]) -> dict[str, float]:
    """Headline scores by client, in points of a hundred, of a finished run's `results.json`."""
    metric = results["metric"]
    found = {client: row.get(metric) for client, row in results["clients"].items()}
    return {client: 100 * (math.nan if score is None else score) for client, score in found.items()}
