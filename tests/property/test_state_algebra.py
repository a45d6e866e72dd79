"""States as values: the arithmetic that every merge is made of, and their way over the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from befit.adapters.state import add, check_same, cosine, fingerprint, interpolate, norm, rename, scale, weighted_mean
from befit.core.errors import PayloadMismatch
from befit.core.values import ClientInfo, Payload, State, Update
from befit.core.wire import from_bytes, to_bytes
from befit.merge.merge import Merge
from tests.tiny import assert_near, assert_same

SHAPES = {"shared/m/A": (2, 3), "shared/m/B": (4, 2), "shared/head/bias": (3,)}


@st.composite
def states(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> State:
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1e-3, 1.0, 1e3]))
    return {key: (size * torch.randn(shape, generator=random)).to(dtype) for key, shape in SHAPES.items()}


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)
EPSILON = 1e-6


def near(first: State, second: State) -> None:
    """Up to float32's rounding at the size of the larger state."""
    size = max(norm(first), norm(second))
    assert_near(first, second, rtol=1e-5, atol=EPSILON * size)


@given(st.data(), WEIGHTS)
def test_the_mean_is_that_of_double_precision(data: st.DataObject, weights: list[float]) -> None:
    items = [data.draw(states()) for _ in weights]
    expected = {
        key: (
            torch.stack([w * item[key].double() for w, item in zip(weights, items, strict=True)]).sum(0) / sum(weights)
        ).float()
        for key in SHAPES
    }
    size = max(map(norm, items))
    assert_near(weighted_mean(items, weights), expected, rtol=1e-5, atol=EPSILON * size)


@given(st.data(), WEIGHTS, st.randoms())
def test_the_mean_does_not_depend_on_the_order(data: st.DataObject, weights: list[float], shuffle) -> None:
    pairs = [(data.draw(states()), weight) for weight in weights]
    mean = weighted_mean(*zip(*pairs, strict=True))
    shuffle.shuffle(pairs)
    assert_near(
        weighted_mean(*zip(*pairs, strict=True)), mean, rtol=1e-5, atol=EPSILON * max(norm(state) for state, _ in pairs)
    )


@given(states(), WEIGHTS, st.floats(0.1, 10))
def test_identical_states_are_a_fixed_point_and_only_ratios_of_weights_count(
    state: State, weights: list[float], factor: float
) -> None:
    near(weighted_mean([state] * len(weights), weights), state)
    other = [scale(state, 1 + index) for index in range(len(weights))]
    near(weighted_mean(other, weights), weighted_mean(other, [weight * factor for weight in weights]))


@given(st.data(), WEIGHTS, st.floats(-4, 4))
def test_the_mean_is_linear(data: st.DataObject, weights: list[float], factor: float) -> None:
    items, others = ([data.draw(states()) for _ in weights] for _ in range(2))
    left = weighted_mean([add(scale(x, factor), y) for x, y in zip(items, others, strict=True)], weights)
    right = add(scale(weighted_mean(items, weights), factor), weighted_mean(others, weights))
    assert_near(left, right, rtol=1e-4, atol=1e-5 * max(map(norm, (*items, *others))))


def test_weights_follow_examples_or_not() -> None:
    """(1*0 + 3*4) / (1+3) = 3; uniformly 2."""
    updates = [
        Update(ClientInfo(name, "", count), Payload({"s/m/A": torch.tensor([value])}))
        for name, count, value in (("a", 1, 0.0), ("b", 3, 4.0))
    ]
    assert float(Merge("examples")(updates)["s/m/A"]) == 3.0
    assert float(Merge("uniform")(updates)["s/m/A"]) == 2.0


def test_half_precision_is_averaged_in_single() -> None:
    """In bfloat16 a running sum of 1 / 1024 would stand still at 1 / 4."""
    mean = weighted_mean([{"s/m/A": torch.ones(1, dtype=torch.bfloat16)}] * 1024, [1.0] * 1024)["s/m/A"]
    assert mean.dtype == torch.bfloat16 and float(mean) == 1.0


def test_whole_numbers_have_no_size() -> None:
    assert norm({"s/m/A": torch.tensor([3.0, 4.0]), "s/m/n": torch.tensor([10**6])}) == 5.0
    assert norm({"s/m/n": torch.tensor([7])}) == norm({}) == 0.0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [2.0, -1.0], [float("nan"), 1.0]])
def test_weights_without_a_positive_sum_or_below_zero_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        weighted_mean([{"s/m/A": torch.ones(1)}] * 2, weights)


@pytest.mark.parametrize(
    "operation",
    [add, cosine, lambda x, y: interpolate(x, y, 0.5), lambda x, y: weighted_mean([x, y], [1, 1]), check_same],
)
def test_states_that_differ_in_keys_or_shapes_are_refused_by_name(operation) -> None:
    state = {"s/m/A": torch.ones(2, 2), "s/m/B": torch.ones(2, 2)}
    for other in ({**state, "s/n/A": torch.ones(1)}, {"s/m/A": torch.ones(2, 2)}):
        with pytest.raises(PayloadMismatch, match=r"1 keys, first 's/(n/A|m/B)'"):
            operation(state, other)
        with pytest.raises(PayloadMismatch, match="1 keys"):
            operation(other, state)
    with pytest.raises(PayloadMismatch, match=r"s/m/B: \(2, 2\) and \(1, 2\)"):
        operation(state, {**state, "s/m/B": torch.ones(1, 2)})  # would broadcast


def test_no_operation_changes_its_operands() -> None:
    first, second = ({"s/m/A": torch.tensor([value])} for value in (1.0, 2.0))
    results = [add(first, second), scale(first, 3.0), interpolate(first, second, 0.3), rename(first, "t")]
    for result in (*results, weighted_mean([first, second], [1, 1]), weighted_mean([first], [1])):
        assert result is not first and result is not second
    assert float(first["s/m/A"]) == 1.0 and float(second["s/m/A"]) == 2.0


@given(states(), states(), st.floats(0, 1))
def test_interpolation_is_exact_at_its_ends_and_on_the_segment_between(x: State, y: State, w: float) -> None:
    assert_same(interpolate(x, y, 1.0), x)
    assert_same(interpolate(x, y, 0.0), y)
    assert_same(interpolate(x, x, w), x)
    assert_near(interpolate(x, y, w), add(scale(x, w), scale(y, 1 - w)), atol=EPSILON * max(norm(x), norm(y)))


@given(states(), states())
def test_norm_and_cosine_are_those_of_flat_vectors(x: State, y: State) -> None:
    flat = [torch.cat([tensor.flatten() for tensor in state.values()]).double() for state in (x, y)]
    assert norm(x) == pytest.approx(float(flat[0].norm()), rel=1e-5)
    assert cosine(x, y) == pytest.approx(float(torch.cosine_similarity(flat[0], flat[1], dim=0)), abs=1e-5)
    assert cosine(x, scale(x, -2.0)) == pytest.approx(-1.0, abs=1e-5)
    assert cosine(x, scale(x, 0.0)) == 0.0 and norm({}) == 0.0


@given(states())
def test_a_fingerprint_sees_every_bit_but_neither_slot_nor_order(state: State) -> None:
    print_ = fingerprint(state)
    assert fingerprint(dict(reversed(rename(state, "other").items()))) == print_
    changed = {key: tensor.clone() for key, tensor in state.items()}
    changed["shared/m/B"][3, 1] = torch.nextafter(changed["shared/m/B"][3, 1], torch.tensor(9e9))
    assert fingerprint(changed) != print_
    assert fingerprint({**state, "shared/m/A": state["shared/m/A"].T.contiguous()}) != print_
    assert fingerprint({**state, "shared/m/A": state["shared/m/A"].double()}) != print_
    moved = {key.replace("m/A", "n/A"): tensor for key, tensor in state.items()}
    assert fingerprint(moved) != print_


TYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
NAMES = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1)


@given(TYPES.flatmap(states), st.dictionaries(NAMES, st.text()))
def test_bytes_bring_back_every_bit(state: State, metadata: dict[str, str]) -> None:
    arrays, found = from_bytes(to_bytes(state, metadata))
    assert_same(arrays, state)
    assert {key: tensor.dtype for key, tensor in arrays.items()} == {key: t.dtype for key, t in state.items()}
    assert found == metadata


@given(states(), st.integers(0, 400))
def test_bytes_cut_short_are_refused(state: State, length: int) -> None:
    data = to_bytes(state, {"a": "b"})
    with pytest.raises(PayloadMismatch, match="a payload is not a readable safetensors file"):
        from_bytes(data[: min(length, len(data) - 1)])
