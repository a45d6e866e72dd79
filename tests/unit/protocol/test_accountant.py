"""Epsilon of parts of a run beside that of the whole."""

from __future__ import annotations

import pytest

from befit.protocol.accountant import Release, above, epsilon, noise_for

pytest.importorskip("dp_accounting")


def test_no_part_of_a_run_is_above_what_the_whole_run_is_within() -> None:
    """Few releases are counted on a coarser grid, which shows more: what seems above is counted again."""
    noise = noise_for((Release(0.02, 1.0, 1005),), 0.5, 1e-5)
    part, whole = ((Release(0.02, noise, count),) for count in (1000, 1005))
    target = epsilon(whole, 1e-5)
    assert epsilon(part, 1e-5) > 0.5 >= target
    assert above(part, target, 1e-5) is None and above(whole, target, 1e-5) is None
    assert above(whole, 0.9 * target, 1e-5) == pytest.approx(target)
