"""Potara's statistics and weight on two coordinates and three samples, in fractions.

sample        g_f of j=1   g_l of j=1   g_f of j=2   g_l of j=2
1                 1            2            1           -1
2                 2            2           -1            1
3                 3            5            0            3

F_f = (14/3, 2/3), F_l = (11, 11/3): their mean over both models and coordinates is 20/4 = 5, so that delta = 1/5 gives
eps = 1. Then v_f = 1/(F_f + 1) = (3/17, 3/5), v_l = (1/12, 3/14), a = 66/85, b = 25/84.

j = 1: cov = 1, var_f = 2/3, var_l = 2, rho = sqrt(3)/2; rho sqrt(v_f v_l) = sqrt(3/272) = 0.105 is more than
min(v_f, v_l) = 1/12, which it becomes (eq. 58). j = 2: cov = -2/3 - 0 * 1 < 0 becomes 0. So c = 1/12 and

w = (b - c) / (a + b - 2c) = (3/14) / (6479/7140) = 1530/6479 = 0.2361
f* = (a b - c^2) / (a + b - 2c)
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from befit.methods.potara import PotaraMerge, closed_form_weight, merged_trace, weigh
from befit.protocol.registry import build_method
from befit.train.paired_fisher import Damping, PairedFisher

CHECKED = {"potara": "its weight in fractions"}

FED = torch.tensor([[1.0, 1.0], [2.0, -1.0], [3.0, 0.0]])
LOCAL = torch.tensor([[2.0, -1.0], [2.0, 1.0], [5.0, 3.0]])
A, B, C = Fraction(66, 85), Fraction(25, 84), Fraction(1, 12)
W = (B - C) / (A + B - 2 * C)


def moments() -> PairedFisher:
    found = PairedFisher({"block.00.q_proj/A": (0, 1), "block.00.q_proj/B": (1, 2)})
    found.add(FED, LOCAL)
    return found


def stage(**options: object) -> PotaraMerge:
    (merging,) = build_method({"name": "potara", "damping": {"delta": 0.2}, **options}).then  # type: ignore[attr-defined]
    assert isinstance(merging.rule, PotaraMerge) and merging.passes == ()
    return merging.rule


def test_the_fraction_itself() -> None:
    assert Fraction(1530, 6479) == W


def test_traces_and_weight_are_the_fractions() -> None:
    traces = moments().variances(Damping(delta=0.2)).traces()
    assert traces == pytest.approx((float(A), float(B), float(C)), rel=1e-12)
    w, degenerate = closed_form_weight(*traces)
    assert w == pytest.approx(float(W), rel=1e-12) and not degenerate
    best = (A * B - C * C) / (A + B - 2 * C)
    assert merged_trace(*traces, w) == pytest.approx(float(best), rel=1e-12)


def test_the_log_says_what_was_clipped_and_how_much_rests_on_the_damping() -> None:
    """One coordinate of two was clipped low, one high; of four F only F_f of j = 2, 2/3, is below eps = 1."""
    weights, numbers = weigh(moments(), stage())
    assert weights == {"": pytest.approx(float(W))}
    shares = {"rho_clipped_low": 0.5, "rho_clipped_high": 0.5, "dead_share": 0.0, "damped_share": 0.25, "samples": 3.0}
    assert {key: numbers[key] for key in shares} == shares


def test_without_correlation_the_weight_is_b_over_a_plus_b() -> None:
    assert weigh(moments(), stage(correlation={"estimate": False}))[1]["w"] == pytest.approx(
        float(B / (A + B)), rel=1e-12
    )


def test_uncentred_moments_are_the_cosine() -> None:
    """j = 1: 21 / sqrt(14 * 33) = 0.977, clipped high as well; j = 2: -2 / sqrt(2 * 11) < 0. The weight is the same."""
    assert weigh(moments(), stage(correlation={"centred": False}))[1]["w"] == pytest.approx(float(W), rel=1e-12)


def test_a_threshold_on_the_correlation_leaves_what_is_above_it() -> None:
    """rho = sqrt(3)/2 - 0.5/sqrt(3) = 1/sqrt(3); times sqrt(1/68) it is sqrt(1/204) = 0.0700 < 1/12: no clip."""
    c = (1 / 204) ** 0.5
    w = (float(B) - c) / (float(A + B) - 2 * c)
    assert weigh(moments(), stage(correlation={"shrink": 0.5}))[1]["w"] == pytest.approx(w, rel=1e-9)


@pytest.mark.parametrize("granularity", ["factor", "tensor"])
def test_finer_weights_are_of_each_group_alone(granularity: str) -> None:
    """j = 1 alone: v_l = c, so w = 0. j = 2 alone, c = 0: (3/14) / (3/5 + 3/14) = 5/19. Heads get the client's."""
    weights, numbers = weigh(moments(), stage(granularity=granularity))
    assert weights == {
        "": pytest.approx(float(W)),
        "block.00.q_proj/A": pytest.approx(0.0, abs=1e-12),
        "block.00.q_proj/B": pytest.approx(5 / 19),
    }
    # 0^2 v_f + 1^2 v_l = 1/12 and v_f v_l / (v_f + v_l) = 3/19
    assert numbers["trace_merged_groups"] == pytest.approx(1 / 12 + 3 / 19)
    assert (numbers["w_min"], numbers["w_max"]) == pytest.approx((0.0, 5 / 19), abs=1e-7)  # logged from float32


def test_one_block_is_the_whole_client() -> None:
    weights, _ = weigh(moments(), stage(granularity="layer"))
    assert weights["block.00.q_proj/A"] == weights["block.00.q_proj/B"] == weights[""]


def test_single_coordinates_get_their_own() -> None:
    weights, _ = weigh(moments(), stage(granularity="coordinate"))
    found = [weights[key] for key in ("block.00.q_proj/A", "block.00.q_proj/B")]
    assert torch.cat([torch.as_tensor(one) for one in found]).tolist() == pytest.approx([0.0, 5 / 19], abs=1e-12)
