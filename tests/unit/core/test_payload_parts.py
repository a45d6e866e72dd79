"""Payloads within payloads: what is put in under a name comes out under it, whatever the name and what lies beside."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from befit.core.values import Payload

NAMES = st.text(st.sampled_from("ab@%0425 /"), max_size=6)


@given(st.dictionaries(NAMES, st.integers(), max_size=4))
def test_parts_of_any_names_come_back_and_nothing_else_with_them(numbers: dict[str, int]) -> None:
    """ "a" and "a@b" are two parts, and neither is in the other."""
    parts = {name: Payload({}, {"n": number}) for name, number in numbers.items()}
    whole = Payload.of_parts(parts) | Payload({}, {"round": 3})
    assert whole.parts() == parts
    for name, part in parts.items():
        assert whole.part(name) == part
        inside = Payload().with_part("base", whole)
        assert inside.part("base", name) == part and inside.part(name) == Payload().part(name)


def test_a_part_is_replaced_whole_and_taken_whole() -> None:
    before = Payload({}, {"x": 1}).with_part("base", Payload({}, {"a": 1, "b": 2}))
    after = before.with_part("base", Payload({}, {"a": 5}))
    assert after.scalars == {"x": 1, **Payload().with_part("base", Payload({}, {"a": 5})).scalars}
    assert before.part("base").scalars == {"a": 1, "b": 2}, "a payload is a value"
    stack = torch.zeros(2)
    large = Payload({"x": torch.ones(1)}).with_part("groups", Payload({"own": stack}))
    assert large.take_part("groups").arrays["own"] is stack
    assert large.arrays.keys() == {"x"} and not large.take_part("groups").arrays


def test_a_split_finds_parts_within_parts() -> None:
    """What shared stages leave in the server's memory of two families, beside the method's own."""
    family = Payload({}, {"own": 1}).with_part("base", Payload({}, {"theirs": 2}))
    server = Payload.of_parts({"f1": family, "f2": family})
    inside, rest = server.split(["base"])
    for name in ("f1", "f2"):
        assert inside.part(name).part("base").scalars == {"theirs": 2} and not inside.part(name).scalars.get("own")
        assert rest.part(name).scalars == {"own": 1}
    assert inside | rest == server
