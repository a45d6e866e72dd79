"""The Nash bargaining solution (FedMosaic, Table 33; docs/methods/fedmosaic.md)."""

from __future__ import annotations

import pytest
import torch

from befit.merge.nash import nash_weights


def updates(clients: int, entries: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(entries, clients, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clients", [1, 2, 5, 12])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_weights_solve_the_bargain_and_are_positive(clients: int, common: float) -> None:
    """`K a = 1 / a` for some multiple a of w: `w_j (K w)_j` is then the same for all j."""
    D = updates(clients) + common * updates(1, seed=1)
    w = nash_weights(D.T @ D)
    assert bool((w > 0).all()) and float(w.sum()) == pytest.approx(1.0, abs=1e-12)
    K = D.T @ D + 1e-8 * (D**2).sum() / clients * torch.eye(clients, dtype=torch.float64)
    products = w * (K @ w)
    assert float((products / products.mean() - 1).abs().max()) < 1e-6


def test_orthogonal_updates_weigh_by_one_over_their_lengths() -> None:
    """`K = diag(l^2)`: `l^2 a = 1 / a`, so `a = 1 / l`; equal for equal lengths."""
    lengths = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(nash_weights(torch.diag(lengths**2)), torch.tensor([4.0, 2.0, 1.0]).double() / 7)
    torch.testing.assert_close(nash_weights(torch.eye(4)), torch.full((4,), 0.25, dtype=torch.float64))


def test_the_solution_is_a_minimum_of_the_convex_function() -> None:
    """`a^T K a / 2 - sum log a` is larger at 200 other positive points; a from w by scaling with `a^T K a = N`."""
    D = updates(4)
    K = D.T @ D
    w = nash_weights(K, ridge=0.0)
    a = w * (4 / float(w @ K @ w)) ** 0.5

    def value(at: torch.Tensor) -> float:
        return float(at @ K @ at / 2 - at.log().sum())

    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        other = a * torch.exp(0.1 * torch.randn(4, generator=generator, dtype=torch.float64))
        assert value(other) > value(a)


def test_the_size_of_all_updates_does_not_matter_and_their_order_follows() -> None:
    D = updates(3)
    gram = D.T @ D
    w = nash_weights(gram)
    torch.testing.assert_close(nash_weights(1e-12 * gram), w, rtol=1e-9, atol=0)
    order = [2, 0, 1]
    torch.testing.assert_close(nash_weights(gram[order][:, order]), w[order], rtol=1e-9, atol=0)


def test_updates_that_depend_on_each_other_or_cancel_have_weights_too() -> None:
    v = updates(1)
    twins = torch.cat([v, v, 2 * v], 1)
    w = nash_weights(twins.T @ twins)
    assert bool(w.isfinite().all()) and float(w[0]) == pytest.approx(float(w[1]), rel=1e-6)
    against = torch.cat([v, -v], 1)
    torch.testing.assert_close(nash_weights(against.T @ against), torch.full((2,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(nash_weights(torch.zeros(3, 3)), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_many_updates_in_few_directions_need_short_steps_to_stay_positive() -> None:
    """Whole steps of Newton's method lead to a negative weight here, and never back."""
    D = torch.tensor([[-500.0, -8, 1000, 241, -24, 11], [-533.0, -7, -353, -97, -22, -75]], dtype=torch.float64)
    w = nash_weights(D.T @ D)
    assert bool((w > 0).all())
    K = D.T @ D + 1e-8 * (D**2).sum() / 6 * torch.eye(6, dtype=torch.float64)
    products = w * (K @ w)
    assert float((products / products.mean() - 1).abs().max()) < 1e-9


def test_what_is_no_matrix_of_products_is_refused() -> None:
    with pytest.raises(ValueError, match=r"square matrix of their products, got \(0, 0\)"):
        nash_weights(torch.zeros(0, 0))
    with pytest.raises(ValueError, match=r"square matrix of their products, got \(2, 3\)"):
        nash_weights(torch.ones(2, 3))
    with pytest.raises(ValueError, match="not finite"):
        nash_weights(torch.tensor([[float("nan")]]))
