"""Forms of arrays on the wire: rounding, what is owed, declared sizes, and parts that are not of the form."""

import pytest
import torch
from torch import Tensor

from befit.adapters.state import specs_of
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, State
from befit.core.wire import payload_bytes, spec_bytes
from befit.core.wire_form import Wire

KEYS = frozenset({"s/m/A", "s/m/B", "s/head/bias", "s/head/scale"})
WIRES = [
    Wire(int8=True, updates=KEYS),
    Wire(top_k=0.1, updates=KEYS),
    Wire(torch.bfloat16, top_k=0.25, updates=KEYS),
    Wire(int8=True, top_k=0.1, updates=KEYS),
]
each_wire = pytest.mark.parametrize("wire", WIRES, ids=["int8", "top-k", "top-k in bfloat16", "top-k in int8"])


def state(seed: int, size: float = 1.0) -> State:
    """Factors, a bias and a single number; and a count, which is never compressed."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"s/m/A": (3, 40), "s/m/B": (50, 3), "s/head/bias": (7,), "s/head/scale": ()}
    arrays = {key: size * torch.randn(shape, generator=draw) for key, shape in shapes.items()}
    return {**arrays, "s/seen/count": torch.tensor([4, 5])}


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def test_int8_is_off_by_half_a_step_of_its_row_at_most() -> None:
    """One scale for each of the three directions of a factor, whichever axis they lie on: the largest entry / 127."""
    sent = Payload(state(0))
    sent.arrays["s/m/A"][1] *= 1000
    sent.arrays["s/m/B"][:, 2] = 0
    wire = WIRES[0]
    encoded = wire.down(sent)
    assert wire.down(encoded) == encoded
    read = wire.received(encoded).arrays
    for key, axis in {"s/m/A": 1, "s/m/B": 0}.items():
        off = (read[key] - sent.arrays[key]).abs().amax(axis)
        assert (off <= sent.arrays[key].abs().amax(axis) / 254 * 1.0001).all() and off.max() > 0
        assert encoded.arrays[f"scale@{key}"].shape == (3,) and encoded.arrays[f"values@{key}"].dtype == torch.int8
    assert torch.equal(read["s/head/scale"], sent.arrays["s/head/scale"])  # a row of one
    assert torch.equal(read["s/seen/count"], sent.arrays["s/seen/count"])


def test_top_k_sends_the_largest_changes_and_the_first_of_equal_ones() -> None:
    wire = Wire(top_k=0.3, updates=frozenset({"x"}))
    start, end = torch.zeros(2, 5), torch.tensor([[1.0, -3, 0, 2, 2], [2, 0, 0, 0, 5]])
    encoded, owed = wire.up(Payload({"x": start + end}), Payload({"x": start}), {})
    assert encoded.arrays["places@x"].tolist() == [1, 3, 9] and encoded.arrays["values@x"].tolist() == [-3, 2, 5]
    assert owed["x"].tolist() == [[1, 0, 0, 0, 2], [2, 0, 0, 0, 0]]
    read = wire.replied(encoded, Payload({"x": start + 10}))  # the server's own values, whatever a client read of them
    assert read.arrays["x"].tolist() == [[10, 7, 10, 12, 10], [10, 10, 10, 10, 15]]


@each_wire
def test_what_is_sent_over_the_rounds_and_what_is_owed_add_up_to_all_changes(wire: Wire) -> None:
    """Sum of the decoded changes + what is owed at the end = sum of the true changes, entry by entry."""
    owed: State = {}
    start, added, true = Payload(state(0)), {}, {}
    for round_ in range(6):
        received = wire.received(wire.down(start))
        trained = {key: value + state(round_ + 1, 0.01)[key] for key, value in received.arrays.items()}
        encoded, owed = wire.up(Payload(trained), received, owed)
        read = wire.replied(encoded, start)
        for key in KEYS:
            added[key] = added.get(key, 0) + (read.arrays[key] - start.arrays[key]).double()
            true[key] = true.get(key, 0) + (trained[key] - received.arrays[key]).double()
        start = read
    assert owed.keys() == KEYS
    for key in KEYS:
        assert difference(added[key] + owed[key].double(), true[key]) < 1e-5
    assert max(difference(added[key], true[key]) for key in KEYS) > 1e-4  # what is owed is needed for that


@each_wire
def test_what_travels_is_what_is_declared_of_it(wire: Wire) -> None:
    """Names, shapes, dtypes and so bytes, both ways."""
    sent = Payload(state(0), {"epochs": 3})
    for encoded, form in (
        (wire.down(sent), wire.sent_down),
        (wire.up(Payload(state(1), sent.scalars), sent, {})[0], wire.sent_up),
    ):
        declared = {name: one for key, spec in specs_of(sent.arrays).items() for name, one in form(key, spec).items()}
        assert specs_of(encoded.arrays) == declared and encoded.scalars == sent.scalars
        assert payload_bytes(encoded) == sum(map(spec_bytes, declared.values())) + len("3")


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("places@s/m/A", torch.tensor([5, 5, *range(6, 16)], dtype=torch.int32), "12 different ones of 120"),
        ("places@s/m/A", torch.arange(109, 121, dtype=torch.int32), "12 different ones of 120"),
        ("places@s/m/A", torch.arange(-1, 11, dtype=torch.int32), "12 different ones of 120"),
        ("places@s/m/A", None, "the form of this wire is values"),
        ("values@s/m/A", torch.ones(11), "came as values"),
        ("values@s/m/A", torch.ones(12, dtype=torch.float64), "came as values"),
        ("extra@s/m/A", torch.ones(12), "came as values"),
        ("s/m/A", torch.ones(3, 40), "came whole"),
        ("s/other/A", torch.ones(3, dtype=torch.float16), "wire.dtype is float32"),
    ],
)
def test_parts_that_are_not_of_the_form_are_refused(part: str, value: Tensor | None, text: str) -> None:
    wire, sent = WIRES[1], Payload(state(0))
    encoded, _ = wire.up(Payload(state(1)), sent, {})
    arrays = {key: array for key, array in {**encoded.arrays, part: value}.items() if array is not None}
    with pytest.raises(PayloadMismatch, match=text):
        wire.replied(Payload(arrays), sent)


def test_an_update_needs_what_it_is_an_update_of() -> None:
    wire, sent = WIRES[1], Payload(state(0))
    encoded, _ = wire.up(Payload(state(1)), sent, {})
    keys = "|".join(wire.updates)
    with pytest.raises(PayloadMismatch, match=f"'({keys})' .* not sent"):
        wire.replied(encoded, Payload())
    with pytest.raises(PayloadMismatch, match=f"did not send '({keys})'"):
        wire.up(Payload(state(1)), Payload(), {})
