"""Whether one run is better than another: means over seeds, paired tests, and how many numbers they need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from befit.core.metrics import spread
from befit.report.comparison import paired_error
from befit.studies.compare.results import ByExample, SignedTest, TTest

LEVEL = 0.05
NORMAL = 1.959964  # standard deviations of a normal distribution that 95 % lie within
Pair = tuple[str | Sequence[float], str | Sequence[float]]
LEAST_PAIRS = 6  # with five pairs the smallest p of the signed-rank test is 2 / 2^5 = 0.0625, above any use


def paired(differences: Sequence[float]) -> TTest | None:
    """Test that the mean difference over seeds is zero (Student 1908), with n - 1 degrees of freedom.

    >>> result = paired([0.01, 0.02, 0.03])
    >>> round(result["p"], 4), round(result["low"], 4)
    (0.0742, -0.0048)
    """
    from scipy import stats

    over = spread(differences)
    if over is None:
        return None
    mean, sd = over["mean"], over["sd"]
    test: TTest = {"n": over["n"], "mean": mean, "sd": sd, "low": None, "high": None, "p": None}
    if sd is None:
        return test
    if sd <= 1e-12 * max(1.0, abs(mean)):  # also where rounding alone makes them differ
        return {**test, "sd": 0.0, "p": 1.0 if abs(mean) <= 1e-12 else None}
    result: Any = stats.ttest_1samp(list(differences), 0.0)
    interval = result.confidence_interval(0.95)
    return {**test, "low": float(interval.low), "high": float(interval.high), "p": float(result.pvalue)}


def mean_difference(mine: Mapping[str, float | None], theirs: Mapping[str, float | None]) -> float | None:
    """The mean over the clients, or newcomers, that have a score in both; None where none has.

    >>> mean_difference({"a": 0.75, "b": None}, {"a": 0.5, "b": 0.25})
    0.25
    """
    both = [(mine[client], theirs.get(client)) for client in mine]
    differences = [one - other for one, other in both if one is not None and other is not None]
    return statistics.fmean(differences) if differences else None


def reach(n: int, level: float) -> float | None:
    """How many standard deviations of the differences their mean has to be from zero to have p < level; None below 2.

    >>> [round(reach(n, 0.05), 2) for n in (2, 3, 5)]
    [8.98, 2.48, 1.24]
    """
    from scipy import stats

    return None if n < 2 else float(stats.t.ppf(1 - level / 2, n - 1)) / math.sqrt(n)


def signed_ranks(differences: Sequence[float]) -> SignedTest:
    """Test that differences are symmetric about zero (Wilcoxon 1945); zeros are dropped.

    Exact up to 50 differences without ties, else by the normal approximation.
    """
    from scipy import stats

    rounded = [round(value, 12) for value in differences]  # equal shares of examples must tie
    better, worse = sum(value > 0 for value in rounded), sum(value < 0 for value in rounded)
    p = None
    if better + worse >= LEAST_PAIRS:
        kept = [value for value in rounded if value]
        tied = len({abs(value) for value in kept}) < len(kept)
        method = "approx" if tied or len(kept) > 50 else "exact"
        result: Any = stats.wilcoxon(kept, method=method)
        p = float(result.pvalue)
    ties = len(rounded) - better - worse
    return {"better": better, "ties": ties, "worse": worse, "n": len(rounded), "p": p}


def by_example(seeds: Sequence[Mapping[str, Pair]], same: bool = False) -> ByExample | None:
    """Differences of two runs paired by test example; None without any.

    seeds  by seed, for every client the scores of both runs on each of its examples, as
           `befit.report.comparison.compact` gives them
    same   whether the examples are those of the first seed in all of them

    The mean is over seeds of the mean over clients; its variance is that of clients' means (`paired_error`), which have
    test examples of their own. So have seeds, unless they are the same: each example counts with its mean over them.

    >>> found = by_example([{"a": ("1101", "1001"), "b": ("11", "11")}])
    >>> found["better"], found["worse"], found["n"], found["mean"]
    (1, 0, 6, 0.125)
    """
    seeds = [clients for clients in seeds if clients]
    if not seeds:
        return None
    mean = variance = 0.0
    better = worse = n = 0
    over_seeds: dict[str, list[float]] = {}
    for clients in seeds:
        share = 1 / (len(seeds) * len(clients))
        for client, (first, second) in clients.items():
            differences = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
            better, worse = better + sum(d > 0 for d in differences), worse + sum(d < 0 for d in differences)
            n += len(differences)
            mean += share * sum(differences) / len(differences)
            variance += 0.0 if same else (share * paired_error(first, second)) ** 2
            before = over_seeds.get(client, [0.0] * len(differences))
            over_seeds[client] = [a + share * d for a, d in zip(before, differences, strict=True)] if same else before
    if same:
        whole = [[value * len(over_seeds) for value in values] for values in over_seeds.values()]
        variance = sum((paired_error(values, [0.0] * len(values)) / len(whole)) ** 2 for values in whole)
    return {"n": n, "better": better, "worse": worse, "mean": mean, "half": NORMAL * math.sqrt(variance)}


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Adjusted for testing several runs (Holm 1979): the i-th smallest of m times m - i, never falling, at most 1.

    None stays None, and does not count among the m.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
    {'a': 0.03, 'b': 0.06, 'c': 0.06, 'd': None}
    """
    known = sorted((value, name) for name, value in p_values.items() if value is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for index, (value, name) in enumerate(known):
        largest = max(largest, min(1.0, value * (len(known) - index)))
        adjusted[name] = largest
    return adjusted
