"""A by L2 and B by canonical correlations, on sums and against the recipe of full width (Seo et al. 2026,
eqs. 19 to 23)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from befit.adapters.pq import orthonormal
from befit.core.errors import DataError
from befit.methods.parts.mosaic.align.factors import (
    DownSums,
    UpSums,
    closed_form,
    losses_by_place,
    project,
    regulariser,
    train_down,
    turn,
)

R, D_I, D_J, O_I, O_J, N = 4, 10, 14, 9, 12, 400


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Two views of one hidden signal of nine dimensions, with means of their own."""
    generator = draw()
    hidden = torch.randn(N, 9, generator=generator)
    views = [
        hidden @ torch.randn(9, d, generator=generator) + noise * torch.randn(N, d, generator=generator) + 1.5
        for d in (D_I, D_J)
    ]
    return views[0], views[1]


def root(S: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(S)
    return vectors * values**power @ vectors.T


def full_width(Z_i: Tensor, Z_j: Tensor, B_i: Tensor, B_j: Tensor, ridge: tuple[float, float]) -> dict[str, Tensor]:
    """The steps of equation 19 on outputs of full width; `ridge` is absolute, for either side."""
    H_i, H_j = Z_i @ B_i.T, Z_j @ B_j.T
    H_i, H_j = H_i - H_i.mean(0), H_j - H_j.mean(0)
    S_ii = H_i.T @ H_i + ridge[0] * torch.eye(H_i.shape[1], dtype=H_i.dtype)
    S_jj = H_j.T @ H_j + ridge[1] * torch.eye(H_j.shape[1], dtype=H_j.dtype)
    U, D, Vh = torch.linalg.svd(root(S_jj, -0.5) @ (H_j.T @ H_i) @ root(S_ii, -0.5))
    U, V = U[:, :R], Vh[:R].T
    Pi_i, Pi_j = root(S_ii, -0.5) @ V, root(S_jj, -0.5) @ U
    B = root(S_jj, 0.5) @ U @ V.T @ root(S_ii, -0.5) @ B_i
    pseudo = torch.linalg.pinv(Pi_j).T @ Pi_i.T @ B_i
    return {"B": B, "pseudo": pseudo, "D": D[:R], "Pi_i": Pi_i, "Pi_j": Pi_j}


def latent(noise: float = 0.3) -> dict[str, Tensor]:
    """Z and B of both models in float64, and the absolute ridges that a relative one of 1e-6 means."""
    X_i, X_j = (X.double() for X in inputs(noise))
    A_i, A_j = (orthonormal((R, d), draw(d)).double() for d in (D_I, D_J))
    B_i, B_j = (orthonormal((d, R), draw(d)).double() for d in (O_I, O_J))
    B_i, B_j = (torch.linalg.qr(B).Q for B in (B_i, B_j))  # orthonormal to float64
    return {"Z_i": X_i @ A_i.T, "Z_j": X_j @ A_j.T, "B_i": B_i, "B_j": B_j}


def absolute(Z: Tensor, ridge: float = 1e-6) -> float:
    Zc = Z - Z.mean(0)
    return ridge * float((Zc.T @ Zc).trace()) / R


def test_the_latent_form_is_the_recipe_of_full_width() -> None:
    """And its pseudo-inverse formula, which squares the condition number: 1e-9 and 1e-8 of entries around 0.5."""
    one = latent()
    T, correlations = turn(UpSums.of(one["Z_i"], one["Z_j"]))
    wide = full_width(**one, ridge=(absolute(one["Z_i"]), absolute(one["Z_j"])))
    torch.testing.assert_close(one["B_j"] @ T, wide["B"], rtol=0, atol=1e-9)
    torch.testing.assert_close(one["B_j"] @ T, wide["pseudo"], rtol=0, atol=1e-8)
    torch.testing.assert_close(correlations, wide["D"], rtol=0, atol=1e-9)


def test_afterwards_a_core_means_the_same_to_both_models_and_before_it_does_not() -> None:
    """`Pi_i^T B_i = Pi_j^T B_j`."""
    one = latent()
    T, _ = turn(UpSums.of(one["Z_i"], one["Z_j"]))
    wide = full_width(**one, ridge=(absolute(one["Z_i"]), absolute(one["Z_j"])))
    target = wide["Pi_i"].T @ one["B_i"]
    torch.testing.assert_close(wide["Pi_j"].T @ one["B_j"] @ T, target, rtol=0, atol=1e-8)
    assert (wide["Pi_j"].T @ one["B_j"] - target).norm() > 0.1 * target.norm()


def test_equal_inputs_need_no_turn_and_scaled_ones_only_their_scale() -> None:
    Z = latent()["Z_i"]
    eye = torch.eye(R, dtype=torch.float64)
    torch.testing.assert_close(turn(UpSums.of(Z, Z))[0], eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(turn(UpSums.of(Z, 3 * Z))[0], 3 * eye, rtol=0, atol=1e-8)


def test_canonical_correlations_do_not_change_by_the_turn() -> None:
    one = latent()
    T, before = turn(UpSums.of(one["Z_i"], one["Z_j"]), ridge=1e-12)
    _, after = turn(UpSums.of(one["Z_i"], one["Z_j"] @ T.T), ridge=1e-12)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


def test_the_turn_keeps_the_columns_space_and_need_not_keep_orthonormality() -> None:
    one = latent()
    B = one["B_j"] @ turn(UpSums.of(one["Z_i"], one["Z_j"]))[0]
    torch.testing.assert_close(one["B_j"] @ one["B_j"].T @ B, B, rtol=0, atol=1e-12)
    assert (B.T @ B - torch.eye(R)).norm() > 0.1


def test_sums_of_batches_are_the_sums_of_all() -> None:
    one = latent()
    whole = UpSums.of(one["Z_i"], one["Z_j"])
    parts = UpSums.of(one["Z_i"][:70], one["Z_j"][:70]) + UpSums.of(one["Z_i"][70:], one["Z_j"][70:])
    torch.testing.assert_close(turn(parts)[0], turn(whole)[0], rtol=0, atol=1e-9)


def test_directions_without_correlation_stay_as_they_are_where_ties_are_broken() -> None:
    """Independent inputs correlate by chance alone; a tie of 10 makes the rotation that of `C_j^1/2 C_i^-1/2`."""
    Z_i, Z_j = (torch.randn(N, R, generator=draw(seed), dtype=torch.float64) for seed in (1, 2))
    eye = torch.eye(R, dtype=torch.float64)
    free, tied = turn(UpSums.of(Z_i, Z_j))[0], turn(UpSums.of(Z_i, Z_j), tie=10.0)[0]
    assert (tied - eye).norm() < 0.3 < (free - eye).norm()


def test_too_few_tokens_and_inputs_that_never_vary_are_refused() -> None:
    Z = latent()["Z_i"]
    with pytest.raises(DataError, match="rank 4 needs at least 40 public tokens, there are 39"):
        turn(UpSums.of(Z[:39], Z[:39]))
    with pytest.raises(DataError, match="same input for every public token"):
        turn(UpSums.of(torch.ones(50, R), torch.ones(50, R)))


def test_the_regulariser_is_zero_for_orthonormal_rows_and_counts_by_pairs_of_ranks() -> None:
    """Rows (1,0), (1,0): the Gram matrix is all ones, two entries off, so 2 / (2 * 1) = 1."""
    assert float(regulariser(orthonormal((3, 8), draw()))) == pytest.approx(0, abs=1e-9)
    assert float(regulariser(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))) == pytest.approx(1.0)


def test_training_lowers_the_distance_raises_the_correlation_and_leaves_the_pivot() -> None:
    X_i, X_j = inputs()
    pivot = {"s": orthonormal((R, D_I), draw(1))}
    start = {"s": orthonormal((R, D_J), draw(2))}
    held = pivot["s"].clone()
    batches = [{"s": (X_i[rows], X_j[rows])} for _ in range(20) for rows in torch.arange(N).split(40)]
    trained = train_down(batches, len(batches), pivot, start, lr=0.03, weight=0.5)
    whole = {"s": (X_i, X_j)}
    before, after = (float(losses_by_place(whole, pivot, A)["s"]) for A in (start, trained))
    assert after < 0.3 * before and torch.equal(pivot["s"], held)

    def correlation(A: Tensor) -> float:
        z_i, z_j = (Z - Z.mean(0) for Z in (X_i @ held.T, X_j @ A.T))
        return float(((z_i * z_j).sum(0) / (z_i.norm(dim=0) * z_j.norm(dim=0))).mean())

    assert correlation(trained["s"]) > correlation(start["s"]) + 0.5
    A = project(trained)["s"]
    torch.testing.assert_close(A @ A.T, torch.eye(R), rtol=0, atol=1e-5)


def test_the_closed_form_is_the_least_squares_solution_and_no_training_is_better() -> None:
    X_i, X_j = inputs()
    pivot = {"s": orthonormal((R, D_I), draw(1))}
    sums = DownSums()
    for rows in torch.arange(N).split(70):
        sums.add({"s": (X_i[rows], X_j[rows])}, pivot)
    A = closed_form(sums.C_jj["s"], sums.C_ji["s"], 1e-9)
    expected = torch.linalg.lstsq(X_j.double(), (X_i @ pivot["s"].T).double()).solution.T
    torch.testing.assert_close(A, expected, rtol=0, atol=1e-4)
    best = float(losses_by_place({"s": (X_i, X_j)}, pivot, {"s": A.float()})["s"])
    generator = draw(3)
    for _ in range(20):
        other = A.float() + 0.05 * torch.randn(R, D_J, generator=generator)
        assert float(losses_by_place({"s": (X_i, X_j)}, pivot, {"s": other})["s"]) > best


@pytest.mark.parametrize("tokens", [300, 40], ids=["enough tokens", "fewer than dimensions"])
@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_products_in_float32_are_added_up_in_float64_and_fit_as_well(tokens: int, outlier: float) -> None:
    """96 inputs that 12 hidden ones decide but for a hundredth, three a hundred times as large, as language
    models have them. What float32 leaves of the least eigenvalues is below zero here."""
    generator = draw(5)
    hidden = torch.randn(tokens, 12, generator=generator)
    X_i, X_j = (
        hidden @ torch.randn(12, 96, generator=generator) + 0.01 * torch.randn(tokens, 96, generator=generator)
        for _ in range(2)
    )
    X_j[:, :3] *= outlier
    pivot = {"s": orthonormal((R, 96), draw(1))}
    narrow, wide = DownSums(torch.float32), DownSums()
    for sums in (narrow, wide):
        for rows in torch.arange(tokens).split(70):
            sums.add({"s": (X_i[rows], X_j[rows])}, pivot)
    assert not torch.equal(narrow.C_jj["s"], wide.C_jj["s"])
    for part in ("C_jj", "C_ji", "S_ii", "z_i", "x_j"):
        one, other = (getattr(sums, part)["s"] for sums in (narrow, wide))
        assert one.dtype == torch.float64 and float((one - other).norm() / other.norm()) < 1e-6, part
    found, expected = (
        wide.loss("s", closed_form(sums.C_jj["s"], sums.C_ji["s"], 1e-9, sums.precision)) for sums in (narrow, wide)
    )
    assert abs(found - expected) < 1e-3 * float(wide.S_ii["s"].trace()) / tokens / R
    if tokens < 96:
        with pytest.raises(torch.linalg.LinAlgError):
            closed_form(narrow.C_jj["s"], narrow.C_ji["s"], 1e-9)


def two_sites() -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of two sites of other widths, the pivot's A, and a start that is far from orthonormal."""
    X_i, X_j = inputs()
    pairs = {"s": (X_i[:30], X_j[:30]), "t": (X_j[30:60], 2 * X_i[30:60])}
    pivot = {"s": orthonormal((R, D_I), draw(1)), "t": orthonormal((R, D_J), draw(2))}
    start = {"s": torch.randn(R, D_J, generator=draw(3)), "t": torch.randn(R, D_I, generator=draw(4))}
    return pairs, pivot, start


@pytest.mark.parametrize("weight", [0.0, 0.5, 20.0])
def test_training_descends_the_sum_of_the_sites_and_the_mean_of_their_regularisers(weight: float) -> None:
    """Against Adam on the loss of equation 20, written out entry by entry; the rate of each step is another test's."""
    pairs, pivot, start = two_sites()
    trained = train_down([pairs] * 4, 40, pivot, start, lr=0.05, weight=weight)
    A = {site: value.clone().requires_grad_() for site, value in start.items()}
    optimiser = torch.optim.Adam(A.values(), lr=0.05)
    for step in range(4):
        distance, penalty = torch.zeros(()), torch.zeros(())
        for site, (X_i, X_j) in pairs.items():
            distance = distance + ((X_i @ pivot[site].T - X_j @ A[site].T) ** 2).sum() / (len(X_i) * R)
            for k in range(R):
                for m in range(R):
                    penalty = penalty + (A[site][k] @ A[site][m] - float(k == m)) ** 2 / (R * (R - 1))
        optimiser.zero_grad()
        (distance + weight * penalty / len(pairs)).backward()
        optimiser.param_groups[0]["lr"] = 0.05 * (step + 1) / 4
        optimiser.step()
    for site, value in A.items():
        torch.testing.assert_close(trained[site], value.detach(), rtol=1e-4, atol=1e-5)


def test_the_rate_of_training_rises_over_a_tenth_of_the_steps_and_falls_by_a_cosine() -> None:
    """Towards a target out of reach the gradient is constant, and every step of Adam is as long as its rate."""
    pairs, pivot, start = two_sites()
    far = {site: 1e7 * value for site, value in pivot.items()}
    places = [train_down([pairs] * n, 20, far, start, lr=0.1, weight=0.0)["s"] for n in range(21)]
    moved = [float((after - before).abs().mean()) for before, after in pairwise(places)]
    falling = [0.05 * (1 + math.cos(math.pi * n / 18)) for n in range(18)]
    assert moved == pytest.approx([0.05, 0.1, *falling], rel=2e-3)
