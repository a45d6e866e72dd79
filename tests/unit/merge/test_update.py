"""From a merged update of one module back to an adapter: what a rank keeps, and what fills the ranks that are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from befit.merge.knots import shared_basis
from befit.merge.rules import Isotropic
from befit.merge.update import (
    DenseUpdate,
    FinishedModule,
    Flattened,
    FlattenedDirections,
    LowRankUpdate,
    Product,
    finish,
)
from tests.unit.merge.oracle import deltas, random_updates

D_OUT, D_IN = 14, 400


def product(rank: int) -> Product:
    ((B, A, _),) = random_updates((rank,), D_OUT, D_IN)
    return Product(B, A)


def finished(update: LowRankUpdate, rank: int, seed: int = 0, spare: Tensor | None = None) -> FinishedModule:
    return finish(update, rank, 1.0, torch.Generator().manual_seed(seed), spare)


def test_the_norm_is_of_the_whole_update_and_the_energy_the_share_that_the_rank_keeps() -> None:
    whole = deltas(random_updates((3,), D_OUT, D_IN))[0]
    sigma = np.linalg.svd(whole, compute_uv=False)
    for update in (product(3), DenseUpdate(torch.from_numpy(whole))):
        found = finished(update, 1)
        assert found.norm == pytest.approx(np.linalg.norm(whole))
        assert found.energy == pytest.approx(sigma[0] ** 2 / (sigma**2).sum()) and not found.filled


def test_the_energy_is_of_the_directions_that_are_there_where_a_tolerance_leaves_some_out() -> None:
    whole = deltas(random_updates((3,), D_OUT, D_IN))[0]
    sigma = np.linalg.svd(whole, compute_uv=False)
    between = float(sigma[0] + sigma[1]) / 2 / float(sigma[0])
    found = finish(product(3), 3, 1.0, torch.Generator(), tolerance=between)
    assert found.filled == 2
    kept = float((found.B @ found.A).square().sum() / (sigma**2).sum())
    assert found.energy == pytest.approx(kept) == pytest.approx(sigma[0] ** 2 / (sigma**2).sum())


def test_of_an_update_with_one_level_a_rank_keeps_its_share_of_the_directions() -> None:
    update = Flattened(product(4), Isotropic(), (D_OUT, D_IN))
    sigma = np.linalg.svd(deltas(random_updates((4,), D_OUT, D_IN))[0], compute_uv=False)
    found = finished(update, 3)
    assert found.energy == pytest.approx(3 / 4) and found.norm == pytest.approx(2 * sigma[:3].mean())


def test_directions_that_cancel_leave_nothing() -> None:
    ((B, A, _),) = random_updates((3,), D_OUT, D_IN)
    basis = shared_basis([(B, A)], [1.0])
    update = FlattenedDirections(basis, torch.zeros(basis.rank, D_IN).double(), Isotropic())
    found = finished(update, 3)
    assert not found.B.any() and found.norm == 0.0 and found.filled == 3 and bool(found.A.any())


def test_ranks_that_the_update_leaves_start_as_lora_does() -> None:
    """Zero in B, and uniform within one over the root of the width in A, drawn from the generator that is given."""
    update, limit = product(2), D_IN**-0.5
    found, same, other = finished(update, 5), finished(update, 5), finished(update, 5, seed=1)
    assert found.filled == 3 and not found.B[:, 2:].any() and found.A.shape == (5, D_IN)
    torch.testing.assert_close(found.B @ found.A, update.B @ update.A)
    rows = found.A[2:]
    assert 0.99 * limit < float(rows.max()) <= limit and -limit <= float(rows.min()) < -0.99 * limit
    assert abs(float(rows.mean())) < 0.1 * limit and float(rows.std()) == pytest.approx(limit / 3**0.5, rel=0.05)
    assert torch.equal(found.A, same.A) and not torch.equal(rows, other.A[2:])


def test_the_present_rows_of_a_stay_only_where_the_update_is_zero() -> None:
    present = torch.full((4, D_IN), 7.0)
    nothing = finished(Product(torch.zeros(D_OUT, 2).double(), product(2).A), 4, spare=present)
    assert torch.equal(nothing.A, present.double()) and not nothing.B.any() and nothing.filled == 4
    assert nothing.norm == 0.0 and nothing.energy == 1.0
    some = finished(product(2), 4, spare=present)
    assert float(some.A[2:].abs().max()) <= D_IN**-0.5
