"""What metrics are called, and by what clients fall into groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["COUNT", "TIED", "at_budget", "group_keys", "spread"]

TIED = 1e-5  # relative; float32 rounds at 6e-8, files keep six digits, and sums over a network add to either
COUNT = "examples of "  # how a row says how many of a client's examples have a value of `evaluate.by`


def group_keys(infos: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What divides these clients into more than one group, of which at least one has several members.

    >>> group_keys({"a": {"language": "en"}, "b": {"language": "en"}, "c": {"language": "de"}})
    ['language']
    """
    keys = dict.fromkeys(key for info in infos.values() for key in info)
    counts = {key: len({info.get(key) for info in infos.values()}) for key in keys}
    return [key for key, count in counts.items() if 1 < count < len(infos)]


def at_budget(metric: str, budget: str) -> str:
    """What a metric is called where it was measured at a further budget; of a value of `evaluate.by` too, which may be
    any text.

    >>> at_budget("accuracy", "r4"), at_budget("accuracy of type r2", "r4")
    ('accuracy r4', 'accuracy r4 of type r2')
    """
    name, of, value = metric.partition(" of ")
    return f"{name} {budget}{of}{value}"


def spread(scales: Sequence[float]) -> float:
    """How far the largest scale is from the smallest, as a part of the largest; 0 for equal ones.

    >>> spread([2.0, 1.5, 1.0])
    0.5
    """
    most = max(scales)
    return (most - min(scales)) / most if most else 0.0
