"""The closed-form weight and its ingredients, for whatever gradients (Zou et al. 2026, eqs. 13 to 20)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from befit.methods.potara import closed_form_weight, merged_trace
from befit.train.paired_fisher import Correlation, Damping, PairedFisher, Variances, group_traces

SPANS = {
    "block.00.q_proj/A": (0, 3),
    "block.00.q_proj/B": (3, 5),
    "block.01.q_proj/A": (5, 8),
    "block.01.q_proj/B": (8, 9),
}
SIZE = 9
DAMPINGS = st.sampled_from(
    [
        Damping(),
        Damping(delta=1e-6),
        Damping(scope="tensor"),
        Damping(drop_dead=False),
        Damping("absolute"),
        Damping("quantile"),
        Damping("quantile", 0.5, drop_dead=False),
    ]
)
RELATIVE = st.sampled_from([Damping(), Damping(delta=1e-6), Damping(scope="tensor"), Damping(drop_dead=False)])


@st.composite
def gradients(draw: st.DrawFn, least: int = 1) -> tuple[Tensor, Tensor]:
    """Paired gradients, (samples, 9) each: of any correlation, scales over six decades, with zeros in some columns."""
    samples = draw(st.integers(least, 7))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    correlation = draw(st.sampled_from([-1.0, -0.5, 0.0, 0.3, 0.9, 1.0]))
    mean = draw(st.sampled_from([0.0, 1.0, 10.0]))
    local, other = torch.randn(2, samples, SIZE, generator=random, dtype=torch.float64)
    fed = correlation * local + (1 - correlation**2) ** 0.5 * other
    scales = 10 ** (6 * torch.rand(2, SIZE, generator=random, dtype=torch.float64) - 3)
    alive = torch.rand(2, SIZE, generator=random) > draw(st.sampled_from([0.0, 0.3, 0.9]))
    return (fed + mean) * scales[0] * alive[0], (local + mean) * scales[1] * alive[1]


def moments_of(pair: tuple[Tensor, Tensor]) -> PairedFisher:
    moments = PairedFisher(SPANS)
    moments.add(*pair)
    return moments


def weigh(pair: tuple[Tensor, Tensor], damping: Damping) -> tuple[float, bool]:
    return closed_form_weight(*moments_of(pair).variances(damping).traces())


@given(gradients(), DAMPINGS, st.booleans(), st.sampled_from([0.0, 1.0]))
def test_the_weight_is_a_share_and_no_other_does_better(pair, damping: Damping, center: bool, shrink: float) -> None:
    a, b, c = moments_of(pair).variances(damping, Correlation(centred=center, shrink=shrink)).traces()
    w, degenerate = closed_form_weight(a, b, c)
    best = merged_trace(a, b, c, w)
    slack = 1e-9 * (a + b)
    assert 0.0 <= w <= 1.0
    assert 0.0 <= c <= min(a, b) * (1 + 1e-12)
    assert best <= min(a, b) + slack
    grid = torch.linspace(0, 1, 201, dtype=torch.float64)
    assert best <= float((grid**2 * a + (1 - grid) ** 2 * b + 2 * grid * (1 - grid) * c).min()) + slack
    if not degenerate:
        curvature = a + b - 2 * c
        # Cancellation in a + b - 2c costs digits, in proportion to how little of it is left.
        slack = 1e-9 * (a + b) * max(1.0, (a + b) / curvature)
        assert a - best == pytest.approx((a - c) * ((a - c) / curvature), abs=slack)
        assert b - best == pytest.approx((b - c) * ((b - c) / curvature), abs=slack)


@given(gradients(), DAMPINGS, st.booleans())
def test_every_covariance_lies_between_zero_and_the_smaller_variance(pair, damping: Damping, center: bool) -> None:
    found = moments_of(pair).variances(damping, Correlation(centred=center))
    assert bool((found.cross >= 0).all())
    assert bool((found.cross <= torch.minimum(found.fed, found.local)).all())
    dead = (pair[0] == 0).all(0) & (pair[1] == 0).all(0)
    expected = ~dead if damping.drop_dead else torch.ones(SIZE, dtype=torch.bool)
    assert torch.equal(found.fed > 0, expected) and torch.equal(found.local > 0, expected)


@given(gradients(), DAMPINGS)
def test_swapping_the_models_gives_the_other_share(pair, damping: Damping) -> None:
    (w, degenerate), (other, _) = weigh(pair, damping), weigh(pair[::-1], damping)
    assume(not degenerate)
    assert w + other == pytest.approx(1.0, abs=1e-6)


@given(gradients(), DAMPINGS, st.integers(0, 1000))
def test_the_order_of_samples_does_not_matter(pair, damping: Damping, seed: int) -> None:
    order = torch.randperm(len(pair[0]), generator=torch.Generator().manual_seed(seed))
    found = [moments_of(one).variances(damping).traces() for one in (pair, (pair[0][order], pair[1][order]))]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@given(gradients(least=2), st.integers(1, 6))
def test_streaming_in_any_pieces_equals_two_passes(pair, size: int) -> None:
    """numpy's two-pass formulas on the whole, against running sums over pieces."""
    streamed = PairedFisher(SPANS)
    for start in range(0, len(pair[0]), size):
        streamed.add(pair[0][start : start + size], pair[1][start : start + size])
    fed, local = pair
    torch.testing.assert_close(streamed.fisher[0], fed.square().mean(0))
    torch.testing.assert_close(streamed.fisher[1], local.square().mean(0))
    left, right = fed - fed.mean(0), local - local.mean(0)
    norms = left.norm(dim=0) * right.norm(dim=0)
    expected = torch.where(norms > 0, (left * right).sum(0) / norms.clamp_min(1e-300), 0.0)
    torch.testing.assert_close(streamed.correlation(), expected, rtol=1e-5, atol=1e-5)


@given(gradients(), RELATIVE, st.floats(-4, 4))
def test_the_scale_of_the_loss_does_not_matter_under_relative_damping(pair, damping: Damping, power: float) -> None:
    # A variance below 1e-30 counts as none, so nothing may be scaled below that.
    (w, degenerate), (scaled, _) = weigh(pair, damping), weigh((pair[0] * 10**power, pair[1] * 10**power), damping)
    assume(not degenerate)
    assert scaled == pytest.approx(w, abs=1e-5)


def test_the_scale_of_the_loss_matters_under_absolute_damping() -> None:
    pair = torch.tensor([[3.0] * SIZE]), torch.tensor([[1.0] * SIZE])
    weights = [weigh((pair[0] * scale, pair[1] * scale), Damping("absolute", 1.0))[0] for scale in (1.0, 100.0)]
    assert weights == pytest.approx([10 / 12, 0.9], abs=1e-3)


@given(gradients(), DAMPINGS)
def test_one_sample_has_no_correlation(pair, damping: Damping) -> None:
    a, b, c = moments_of((pair[0][:1], pair[1][:1])).variances(damping).traces()
    assert c == 0.0
    if a + b > 0:
        assert closed_form_weight(a, b, c)[0] == pytest.approx(b / (a + b))


@given(gradients(), RELATIVE)
def test_single_coordinates_without_correlation_are_fisher_merging(pair, damping: Damping) -> None:
    """w_j = F_f / (F_f + F_l) of the damped Fisher informations."""
    moments = moments_of(pair)
    found = moments.variances(damping, Correlation(estimate=False)).coordinate_weights()
    F_f, F_l = moments.fisher
    mean = (F_f + F_l) / 2
    for key, (start, stop) in SPANS.items():
        epsilon = damping.size * (mean if damping.scope == "client" else mean[start:stop]).mean()
        f, local = F_f[start:stop] + epsilon, F_l[start:stop] + epsilon
        alive = (F_f[start:stop] > 0) | (F_l[start:stop] > 0)
        expected = torch.where(alive, f / (f + local).clamp_min(1e-300), 0.5)
        torch.testing.assert_close(found[key], expected)


def total(groups: list[tuple[float, float, float]]) -> float:
    return sum(merged_trace(a, b, c, closed_form_weight(a, b, c)[0]) for a, b, c in groups)


def by_coordinate(found: Variances) -> list[tuple[float, float, float]]:
    return list(zip(found.fed.tolist(), found.local.tolist(), found.cross.tolist(), strict=True))


@given(gradients(), DAMPINGS)
def test_a_finer_partition_has_a_smaller_total_trace(pair, damping: Damping) -> None:
    found = moments_of(pair).variances(damping)
    totals = {name: total(list(group_traces(found, name).values())) for name in ("tensor", "layer", "factor")}
    client, slack = total([found.traces()]), 1e-9 * (1 + sum(found.traces()))
    assert total(by_coordinate(found)) <= totals["tensor"] + slack
    assert totals["tensor"] <= min(totals["layer"], totals["factor"]) + slack
    assert max(totals["layer"], totals["factor"]) <= client + slack
    weights = torch.cat([*found.coordinate_weights().values()])
    mixed = weights**2 * found.fed + (1 - weights) ** 2 * found.local + 2 * weights * (1 - weights) * found.cross
    assert float(mixed.sum()) == pytest.approx(total(by_coordinate(found)), rel=1e-6, abs=slack)


def test_groups_are_the_blocks_the_factors_and_the_tensors() -> None:
    found = moments_of((torch.ones(2, SIZE), torch.ones(2, SIZE))).variances(Damping())
    names = {one: {tuple(sorted(keys)) for keys in group_traces(found, one)} for one in ("layer", "factor", "tensor")}
    q0, q1 = ("block.00.q_proj/A", "block.00.q_proj/B"), ("block.01.q_proj/A", "block.01.q_proj/B")
    assert names["layer"] == {q0, q1}
    assert names["factor"] == {(q0[0], q1[0]), (q0[1], q1[1])}
    assert names["tensor"] == {(key,) for key in SPANS}


@given(gradients(least=2))
@settings(max_examples=30)
def test_identical_models_are_degenerate(pair) -> None:
    """Wherever there is a gradient it varies, so that it correlates with itself."""
    varied = pair[0] * torch.linspace(1, 2, len(pair[0]), dtype=torch.float64)[:, None]
    w, degenerate = weigh((varied, varied), Damping())
    assert (w, degenerate) == (0.5, True)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_the_formula_alone_keeps_its_promises_for_any_traces(a: float, b: float, share: float) -> None:
    c = share * min(a, b)
    w, degenerate = closed_form_weight(a, b, c)
    assume(not degenerate)
    assert 0 <= w <= 1
    assert merged_trace(a, b, c, w) <= min(a, b) * (1 + 1e-9)
    assert closed_form_weight(b, a, c)[0] == pytest.approx(1 - w, abs=1e-6)
    if share == 0:
        assert w == pytest.approx(b / (a + b))


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_traces_that_are_not_finite_raise(position: int, number: float) -> None:
    traces = [1.0, 2.0, 0.5]
    traces[position] = number
    with pytest.raises(FloatingPointError, match="not finite"):
        closed_form_weight(*traces)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_a_flat_trace_is_halved_and_flagged(value: float) -> None:
    assert closed_form_weight(value, value, value) == (0.5, True)
