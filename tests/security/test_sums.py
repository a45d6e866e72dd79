"""Hostile secure sums against a real site: each is refused in one sentence, and nothing has left in the open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from befit.protocol.secure.shamir import SHARE
from tests.security.sums import ALL, CASES, Case, Consortium, Sum, done


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium(tmp_path_factory.mktemp("consortium"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_sum_is_refused_and_nothing_is_in_the_open(case: Case, consortium: Consortium) -> None:
    sum_ = Sum(consortium, case.change)
    said, arrays = case.play(sum_)
    assert said["kind"] == "failure" and not arrays, said
    assert case.reason in said["reason"], said["reason"]
    assert "\n" not in said["reason"] and len(said["reason"]) < 400
    assert {name for name, _ in sum_.sent} <= {"keys", "boxes", "hidden", "shares"}
    assert all(array.dtype == torch.uint8 for _, array in sum_.sent)
    assert sum(len(array) * (array.shape[1] == SHARE) for _, array in sum_.sent) <= len(ALL)  # one secret of each


def test_the_pages_count_them() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert f"| {len(CASES)} | {len(CASES)} refused in a sentence" in (docs / "security.md").read_text()
    assert f"`tests/security/sums.py`, {len(CASES)} sums" in (docs / "secure_sums.md").read_text()


def test_an_honest_sum_is_served(consortium: Consortium) -> None:
    """What all cases begin with, to its end; asked again the site answers the same."""
    sum_ = Sum(consortium, {}).begin().shared().trained()
    done(sum_.agree(ALL))
    _, shares = done(sum_.uncover(ALL))
    _, again = done(sum_.uncover(ALL))
    assert shares["shares"].shape == (5, SHARE) and shares["shares"].equal(again["shares"])
