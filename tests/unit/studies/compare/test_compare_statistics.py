"""The tests behind a comparison, against SciPy's two-sample forms, tables and hand computation."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from befit.core.metrics import spread
from befit.report.comparison import paired_error
from befit.studies.compare.statistics import LEAST_PAIRS, by_example, holm, paired, reach, signed_ranks


def test_one_number_has_no_spread_and_none_has_no_mean() -> None:
    assert spread([]) is None
    one = spread([0.5])
    assert one is not None
    assert one == {"mean": 0.5, "sd": None, "n": 1}


def test_the_paired_test_is_the_one_of_two_columns() -> None:
    mine, theirs = [0.81, 0.84, 0.79, 0.90], [0.80, 0.80, 0.80, 0.85]
    found = paired([a - b for a, b in zip(mine, theirs, strict=True)])
    expected = stats.ttest_rel(mine, theirs)
    assert found is not None
    assert found["p"] == pytest.approx(float(expected.pvalue))  # type: ignore[union-attr]
    assert found["low"] == pytest.approx(float(expected.confidence_interval().low))  # type: ignore[union-attr]


def test_three_seeds_by_hand() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.464; with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)."""
    found = paired([1.0, 2.0, 3.0])
    t = 2 * math.sqrt(3)
    assert found is not None
    assert found["p"] == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert found["low"] == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found["high"] == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)


def test_what_a_single_seed_or_a_constant_difference_cannot_say() -> None:
    assert paired([0.1]) == {"n": 1, "mean": 0.1, "sd": None, "low": None, "high": None, "p": None}
    assert paired([0.0, 0.0]) == {"n": 2, "mean": 0.0, "sd": 0.0, "low": None, "high": None, "p": 1.0}
    same = paired([0.1 + 0.2, 0.3])  # equal but for rounding
    assert same is not None
    assert (same["sd"], same["p"], same["low"]) == (0.0, None, None)
    nothing = paired([0.3 - (0.1 + 0.2), 0.0])  # zero but for rounding
    assert nothing is not None
    assert (nothing["sd"], nothing["p"], nothing["low"]) == (0.0, 1.0, None)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_a_difference_of_that_reach_is_just_found(n: int) -> None:
    """n differences with that mean, in units of their own standard deviation, have p = 0.05."""
    base = np.linspace(-1, 1, n)
    base = (base - base.mean()) / statistics.stdev(base)
    needed = reach(n, 0.05)
    assert needed is not None
    found = paired(list(base + needed))
    assert found is not None and found["p"] == pytest.approx(0.05)
    assert reach(1, 0.05) is None


def test_signed_ranks_by_counting_all_signs() -> None:
    """Exact p: the share of all 2^7 sign patterns whose smaller rank sum is at most the observed one."""
    differences = [0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7]  # the negative one has rank 2
    sums = [
        sum(rank for rank, sign in zip(range(1, 8), signs, strict=True) if sign < 0)
        for signs in itertools.product((-1, 1), repeat=7)
    ]
    extreme = sum(min(total, 28 - total) <= 2 for total in sums) / 2**7
    found = signed_ranks(differences)
    assert (found["better"], found["ties"], found["worse"], found["n"]) == (6, 0, 1, 7)
    assert found["p"] == pytest.approx(extreme)


def test_equal_clients_tie_even_where_floating_point_tells_them_apart() -> None:
    found = signed_ranks([0.3 - (0.1 + 0.2), 0.05, -0.05])
    assert (found["better"], found["ties"], found["worse"]) == (1, 1, 1)


def test_too_few_differences_have_no_p() -> None:
    assert signed_ranks([0.1] * (LEAST_PAIRS - 1) + [0.0] * 20)["p"] is None
    assert signed_ranks([0.1, 0.2, 0.3, 0.4, 0.5])["p"] is None
    assert signed_ranks([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])["p"] == pytest.approx(2 / 2**6)


def test_tied_ranks_use_the_normal_approximation() -> None:
    differences = [0.1, 0.1, -0.1, 0.2, 0.2, 0.3, 0.4, 0.1]
    expected = stats.wilcoxon(differences, method="approx").pvalue  # type: ignore[union-attr]
    assert signed_ranks(differences)["p"] == pytest.approx(float(expected))


@pytest.mark.parametrize(("n", "method"), [(50, "exact"), (51, "approx")])
def test_more_than_fifty_differences_use_the_normal_approximation(n: int, method: str) -> None:
    differences = [0.01 * (k + 1) * (-1 if k % 3 == 0 else 1) for k in range(n)]
    by_method = {name: float(stats.wilcoxon(differences, method=name).pvalue) for name in ("exact", "approx")}  # type: ignore[union-attr]
    assert by_method["exact"] != by_method["approx"] and signed_ranks(differences)["p"] == by_method[method]


def test_examples_count_by_their_client_and_clients_by_their_seed() -> None:
    """One client in the first seed, whose mean is 1 / 2, and two in the second, with means of 1 and 0."""
    seeds = [{"a": ("10", "00")}, {"a": ("11", "00"), "b": ("0101", "0101")}]
    found = by_example(seeds)
    assert found is not None and found["mean"] == pytest.approx((1 / 2 + (1 + 0) / 2) / 2)
    errors = [paired_error(*pair) for clients in seeds for pair in clients.values()]
    variance = sum((share * error) ** 2 for share, error in zip((1 / 2, 1 / 4, 1 / 4), errors, strict=True))
    assert found["half"] == pytest.approx(1.959964 * math.sqrt(variance))
    assert (found["n"], found["better"], found["worse"]) == (8, 3, 0)


def test_the_same_examples_in_every_seed_are_no_further_examples() -> None:
    """Two equal seeds have the interval of one; of examples of their own it would be narrower by the root of two. A
    seed without anything to compare is none."""
    seed = {"a": ("1101", "1001"), "b": ("110111", "100101")}
    once, same, apart = by_example([seed]), by_example([seed, {}, seed], same=True), by_example([{}, seed, seed])
    assert once is not None and same is not None and apart is not None
    assert same["mean"] == pytest.approx(once["mean"]) and apart["mean"] == pytest.approx(once["mean"])
    assert same["half"] == pytest.approx(once["half"]) and apart["half"] == pytest.approx(once["half"] / math.sqrt(2))
    assert (once["n"], same["n"], apart["n"]) == (10, 20, 20)


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3, then 0.03 x 2 (not below 0.06), then 0.9; two equal p fare alike."""
    found = holm({"a": 0.02, "b": 0.01, "c": 0.9, "d": 0.03})
    assert found == pytest.approx({"b": 0.04, "a": 0.06, "d": 0.06, "c": 0.9})
    assert holm({"a": 0.02, "b": 0.02}) == pytest.approx({"a": 0.04, "b": 0.04})
    assert holm({"a": 0.7, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_what_was_not_tested_is_no_comparison() -> None:
    assert holm({"a": 0.02, "b": None}) == {"a": 0.02, "b": None}
    assert holm({}) == {}
