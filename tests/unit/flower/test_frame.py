"""What a frame may hold is looked at before an array is made of it."""

from __future__ import annotations

import pytest
import torch

from befit.core.errors import PayloadMismatch
from befit.flower.frame import LONGEST_NAME, MOST_ARRAYS, MOST_AXES, pack, unpack

ONE = torch.zeros(1)


@pytest.mark.parametrize(
    "arrays, reason",
    [
        ({"a" * (LONGEST_NAME + 1): ONE}, "invalid name"),
        ({"a\x1b[2J": ONE}, "invalid name"),
        ({f"a{number}": torch.zeros(0) for number in range(MOST_ARRAYS + 1)}, "arrays, more than"),
        ({"a": torch.zeros([1] * (MOST_AXES + 1))}, f"of {MOST_AXES + 1} axes"),
    ],
    ids=["a long name", "a control character", "many arrays", "many axes"],
)
def test_arrays_beyond_any_use_are_refused(arrays: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(PayloadMismatch, match=reason) as refused:
        unpack(pack({"kind": "train"}, arrays), "the reply")
    assert len(str(refused.value)) < 300


def test_what_is_of_use_comes_back() -> None:
    header, arrays = unpack(pack({"kind": "train"}, {"a" * LONGEST_NAME: ONE}), "the reply")
    assert header == {"kind": "train"} and torch.equal(arrays["a" * LONGEST_NAME], ONE)
