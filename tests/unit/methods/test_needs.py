"""Which methods need to see each client's update by itself, so that a sum over clients would not do."""

from __future__ import annotations

import pytest

from befit.protocol.registry import build_method, method_names

BY_SUMS = {
    *("dept", "ditto", "fedadagrad", "fedadam", "fedavg", "fedavgm", "feddat", "feddpa", "feddpa_t", "fedit"),
    *("fedl2p", "fedp2eft", "fedprox", "fedsa", "fedsim", "fedyogi", "ffa_lora", "fisher_merging", "guidance"),
    *("fdlora", "fedsvd", "interpolation", "potara", "relora", "rolora", "scaffold"),
}
ALONE = {"adalora", "bayestune", "local", "lora"}  # from which nothing leaves
NAMES = set(method_names())  # before any test runs, since tests register methods of their own


def test_every_method_declares_whether_it_needs_individual_updates() -> None:
    individual = {name for name in NAMES if build_method(name).needs.individual_updates}
    assert individual == NAMES - BY_SUMS - ALONE


@pytest.mark.parametrize(
    ("merge", "individual"),
    [
        ({}, False),
        ({"rule": "task-arithmetic"}, False),
        ({"rule": "ties"}, True),
        ({"space": "delta"}, True),
        ({"space": "knots", "rule": "ties"}, True),
    ],
)
@pytest.mark.parametrize("method", ["guidance", "relora"])
def test_a_merge_that_is_no_sum_needs_individual_updates(method: str, merge: dict[str, str], individual: bool) -> None:
    block = {"name": method, "merge": merge}
    assert build_method(block).needs.individual_updates is individual
