"""What is left of updates when a merge is cut to a rank, and what becomes of parts that are zero or damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from befit.core.errors import PayloadMismatch
from befit.core.values import ClientInfo, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from tests.unit.merge import oracle
from tests.unit.merge.oracle import Updates, deltas, random_updates

CUT_SPACES = ["knots", "delta"]


def sent(updates: Updates) -> list[Update]:
    """As float32 adapters of clients c0, c1, ... with one example each."""
    states = [{"s/m/A": A.float(), "s/m/B": (s * B).float()} for B, A, s in updates]
    return [Update(ClientInfo(f"c{k}", "m", 1), Payload(state)) for k, state in enumerate(states)]


def product(state: State, scale: float = 1.0) -> np.ndarray:
    return (scale * state["s/m/B"].double() @ state["s/m/A"].double()).numpy()


def merged(updates: Updates, **options: Any) -> np.ndarray:
    return product(Merge(**options)(sent(updates)))


def alike(clients: int, rank: int, spread: float, seed: int = 0) -> Updates:
    """One update of equal singular values that everybody has, and a small change by each client."""
    random = torch.Generator().manual_seed(seed)
    B, _ = torch.linalg.qr(torch.randn(40, rank, generator=random, dtype=torch.float64))
    A, _ = torch.linalg.qr(torch.randn(30, rank, generator=random, dtype=torch.float64))
    changes = [
        (torch.randn(40, rank, generator=random).double(), torch.randn(30, rank, generator=random).double())
        for _ in range(clients)
    ]
    return [(B + spread * dB / 40**0.5, (A + spread * dA / 30**0.5).T, 1.0) for dB, dA in changes]


# --- the level of Iso-C ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", CUT_SPACES)
def test_the_level_of_iso_c_by_hand(space: Any) -> None:
    """The mean of diag(8, 0, 2, 0) and diag(0, 4, 0, 0) is diag(4, 2, 1, 0), of which rank 2 keeps 4 and 2.

    Their mean is 3; of all three values 7 / 3; over the width 7 / 4.
    """
    eye = torch.eye(4, dtype=torch.float64)
    updates = [
        (eye[:, [0, 2]] * torch.tensor([8.0, 2.0]), eye[[0, 2]], 1.0),
        (eye[:, [1, 3]] * torch.tensor([4.0, 0.0]), eye[[1, 3]], 1.0),
    ]
    for options, level in (({}, 3.0), ({"iso_mean": "rank"}, 7 / 3), ({"iso_mean": "full"}, 7 / 4)):
        found = merged(updates, rule="iso-c", space=space, **options)
        np.testing.assert_allclose(found, np.diag([level, level, 0, 0]), atol=1e-6)


ISO_C = [
    {"space": "delta", "rule": "iso-c"},
    {"space": "knots", "rule": "iso-c"},
    {"space": "knots", "rule": "iso-c", "knots_input": "v"},
]


@pytest.mark.parametrize("options", ISO_C)
@pytest.mark.parametrize("spread", [0.1, 0.01, 1e-4])
def test_iso_c_of_alike_clients_keeps_the_norm_of_their_mean(options: dict[str, Any], spread: float) -> None:
    updates = alike(8, 8, spread)
    mean = np.linalg.norm(oracle.mean(deltas(updates), [1.0] * 8))
    assert np.linalg.norm(merged(updates, **options)) / mean == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("options", ISO_C)
def test_iso_c_of_one_client_keeps_its_nuclear_norm(options: dict[str, Any]) -> None:
    """Of V there is nothing to flatten: one client's V is orthonormal, and comes back as it is."""
    updates = random_updates((3,), 12, 10)
    sigma = np.linalg.svd(deltas(updates)[0], compute_uv=False)[:3]
    found = np.linalg.svd(merged(updates, **options), compute_uv=False)[:3]
    np.testing.assert_allclose(found, sigma if "knots_input" in options else [sigma.mean()] * 3, rtol=1e-5)


@pytest.mark.parametrize("space", CUT_SPACES)
def test_iso_c_of_unrelated_clients_keeps_the_nuclear_norm_of_what_the_rank_keeps(space: Any) -> None:
    updates = random_updates((4,) * 6, 40, 30)
    sigma = np.linalg.svd(oracle.mean(deltas(updates), [1.0] * 6), compute_uv=False)[:4]
    found = np.linalg.svd(merged(updates, rule="iso-c", space=space), compute_uv=False)[:4]
    np.testing.assert_allclose(found, sigma.mean(), rtol=1e-5)


@pytest.mark.parametrize("options", ISO_C)
def test_a_scale_of_two_gives_twice_the_product(options: dict[str, Any]) -> None:
    updates = random_updates((2, 2, 2), 20, 16)
    twice, once = merged(updates, **options, scale=2), merged(updates, **options)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5, atol=1e-6)
    assert np.abs(once).max() > 0.1


@pytest.mark.parametrize("options", ISO_C)
def test_iso_c_round_after_round_does_not_fade_where_clients_add_next_to_nothing(options: dict[str, Any]) -> None:
    merge, updates, random = Merge(**options), sent(alike(8, 8, 0.01)), torch.Generator()
    norms = []
    for _ in range(3):
        common = merge(updates)
        norms.append(float(np.linalg.norm(product(common))))
        updates = [
            Update(
                ClientInfo(f"c{k}", "m", 1),
                Payload(
                    {key: v + 1e-3 * v.std() * torch.randn(v.shape, generator=random) for key, v in common.items()}
                ),
            )
            for k in range(8)
        ]
    assert norms == pytest.approx([8**0.5] * 3, rel=0.01)


def test_the_level_of_iso_c_of_bare_directions_against_dense_decompositions() -> None:
    """`U Sigma F`, whose singular values are Sigma: the first r rows stay, at the mean of `(M M^T)^(1/2)` over them."""
    updates = random_updates((2, 2, 2), 20, 16)
    U, sigma, V = oracle.stack_svd(deltas(updates))
    left, values, right = np.linalg.svd(np.mean(V, axis=0), full_matrices=False)
    root = (left * values) @ left.T
    for rank in (2, 6):
        level = np.trace(root[:rank, :rank]) / rank
        expected = level * (U[:, :rank] * sigma[:rank]) @ (left @ right)[:rank]
        found = merged(updates, space="knots", rule="iso-c", knots_input="v", rank=rank)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
        overall = merged(updates, space="knots", rule="iso-c", knots_input="v", rank=rank, iso_mean="rank")
        np.testing.assert_allclose(overall * level / values.mean(), expected, atol=1e-5 * np.abs(expected).max())
    assert level == pytest.approx(values.mean())


@pytest.mark.parametrize("options", ISO_C)
def test_iso_c_of_opposites_is_nothing(options: dict[str, Any]) -> None:
    ((B, A, s),) = random_updates((3,), 12, 10)
    np.testing.assert_allclose(merged([(B, A, s), (-B, A, s)], **options), 0, atol=1e-12)


def test_where_nothing_is_cut_the_level_is_over_all_directions() -> None:
    updates = random_updates((2, 2), 9, 7)
    one = {
        mean: dict(Merge(rule="iso-c", space="delta", iso_mean=mean).updates_of(sent(updates)))["s/m"]
        for mean in ("kept", "rank")
    }
    assert all(torch.equal(*both) for both in zip(one["kept"], one["rank"], strict=True))
    factors = [Merge(rule="iso-c", iso_mean=mean)(sent(updates)) for mean in ("kept", "rank")]
    assert all(torch.equal(factors[0][key], factors[1][key]) for key in factors[0])


@pytest.mark.parametrize("options", [{"rule": "iso-c"}, {"rule": "ties"}, {"rule": "iso-c", "knots_input": "v"}])
def test_directions_at_the_rounding_of_float32_decide_nothing(options: dict[str, Any]) -> None:
    """Two directions of size 1, and two more of a millionth of it that differ from client to client."""
    random = torch.Generator().manual_seed(0)
    B, A = torch.randn(20, 4, generator=random).double(), torch.randn(4, 16, generator=random).double()
    B[:, 2:] = 0
    noisy = [B + torch.cat([torch.zeros(20, 2), 1e-6 * torch.randn(20, 2, generator=random)], 1) for _ in range(3)]
    exact = merged([(B, A, 1.0)] * 3, space="knots", **options)
    found = merged([(B_k, A, 1.0) for B_k in noisy], space="knots", **options)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 1e-4


# --- who votes in KnOTS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "density"), [("ties", 1.0), ("ties", 0.2), ("dare-ties", 1.0)])
@pytest.mark.parametrize("knots_input", ["sigma_v", "v"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_client_that_learnt_nothing_has_no_vote_in_knots(
    rule: Any, density: float, knots_input: Any, place: int
) -> None:
    updates = random_updates((3, 3), 20, 16)
    zero = (torch.zeros(20, 3, dtype=torch.float64), updates[0][1], 1.0)
    how = {"space": "knots", "rule": rule, "density": density, "knots_input": knots_input}
    found, expected = merged([*updates[:place], zero, *updates[place:]], **how), merged(updates, **how)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def blocks(outputs: bool) -> Updates:
    """Two updates of rank 2 to different outputs, or from different inputs, so that no entry has two voters."""
    updates = random_updates((2, 2), 12, 10)
    for k, (B, A, _) in enumerate(updates):
        if outputs:
            B[6 * k : 6 * k + 6] = 0
        else:
            A[:, 5 * k : 5 * k + 5] = 0
    return updates


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_ties_of_clients_that_share_no_entry_is_their_sum(outputs: bool, precision: Any) -> None:
    updates = blocks(outputs)
    options: dict[str, Any] = {"rule": "ties", "density": 1.0, "rank": 4, "precision": precision}
    expected = np.sum(deltas(updates), axis=0)
    for space in CUT_SPACES:
        found = merged(updates, space=space, **options)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5, space


def test_ties_of_clients_whose_outputs_are_orthogonal_but_for_rounding_is_their_sum() -> None:
    Q, _ = torch.linalg.qr(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
    updates = [
        (Q[:, part] * torch.tensor([3.0, 2.0]), A, 1.0)
        for part, (_, A, _) in zip((slice(0, 2), slice(2, 4)), random_updates((2, 2), 20, 16), strict=True)
    ]
    expected = np.sum(deltas(updates), axis=0)
    found = merged(updates, space="knots", rule="ties", density=1.0, rank=4)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-4


# --- factors of the result -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", CUT_SPACES)
def test_the_singular_values_go_to_both_factors_or_to_b(space: Any) -> None:
    updates = random_updates((3, 3), 20, 16)
    U, S, Vh = np.linalg.svd(oracle.mean(deltas(updates), [1.0, 1.0]))
    even, left = (
        Merge(space=space, split=split)(sent(updates), MergeContext(scales={"c0": 1.0, "c1": 1.0}, scale=2.0))
        for split in ("even", "B")
    )
    for state in (even, left):
        np.testing.assert_allclose(product(state, 2.0), (U[:, :3] * S[:3]) @ Vh[:3], atol=1e-5)
    grams = {
        key: (state["s/m/A"] @ state["s/m/A"].T, state["s/m/B"].T @ state["s/m/B"])
        for key, state in (("even", even), ("B", left))
    }
    near_diagonal(grams["even"][0], S[:3] / 2)
    near_diagonal(grams["even"][1], S[:3] / 2)
    near_diagonal(grams["B"][0], np.ones(3))
    near_diagonal(grams["B"][1], (S[:3] / 2) ** 2)


def near_diagonal(found: Tensor, values: np.ndarray) -> None:
    np.testing.assert_allclose(found.double().numpy(), np.diag(values), atol=1e-5 * max(1.0, values.max()))


# --- damaged updates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule": "task-arithmetic"},
        {"rule": "ties"},
        {"rule": "magnitude"},
        {"rule": "iso-c"},
        {"space": "knots"},
        {"space": "knots", "rule": "ties"},
        {"space": "knots", "rule": "iso-c"},
        {"space": "delta", "rule": "ties"},
    ],
)
def test_numbers_that_are_not_finite_are_refused_with_the_name_of_their_client(
    options: dict[str, Any], bad: float
) -> None:
    updates = sent(random_updates((2, 2, 2), 6, 5))
    updates[1].payload.arrays["s/m/B"][3, 1] = bad
    with pytest.raises(PayloadMismatch, match=r"client c1: s/m/B holds numbers that are not finite"):
        Merge(**options)(updates)
    if options.get("space"):
        with pytest.raises(PayloadMismatch, match=r"client c1: s/m/B holds numbers that are not finite"):
            dict(Merge(**options).updates_of(updates))


@pytest.mark.parametrize("options", [{"precision": "float32"}, {"space": "delta", "rule": "ties"}])
def test_products_that_are_not_finite_are_refused_with_the_name_of_the_largest(options: dict[str, Any]) -> None:
    updates = sent(random_updates((2, 2), 6, 5))
    for value in updates[1].payload.arrays.values():
        value.mul_(1e30)
    how = Merge(**{"space": "knots", **options})
    with pytest.raises(PayloadMismatch, match=r"client c1: s/m has weights or an alpha too large .* norm \d.*e\+6"):
        how(updates)
    with pytest.raises(PayloadMismatch, match=r"client c1: s/m has weights"):
        dict(how.updates_of(updates, rank=2))


def test_a_result_that_does_not_fit_its_type_is_refused() -> None:
    updates = sent(random_updates((2, 2), 6, 5))
    with pytest.raises(PayloadMismatch, match=r"the merged s/m/B does not fit into torch\.float32.*smaller scale"):
        Merge(scale=1e300)(updates)
