"""Eleven properties that merges keep (docs/methods/guidance.md, Merging); the number of a test is that of its property.

Against the dense textbook forms of `tests/unit/merge/oracle.py`, in float64 to 1e-10 and in float32 to 1e-5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from befit.adapters.lowrank import Pair, spectrum, stack
from befit.core.seeds import derive_seed
from befit.merge.knots import shared_basis
from befit.merge.rules import ClientTensors, Elementwise, Isotropic, Rule, apply_elementwise
from befit.merge.spaces import Delta, Knots, ModuleUpdates, merge_factors, merge_tensors, merge_updates
from befit.merge.trim import Cut, cut_of, cuts_of_stream, kept_count, trim
from befit.merge.update import finish
from tests.unit.merge import oracle
from tests.unit.merge.oracle import Updates, deltas, random_updates

MEAN, SUM = Elementwise(), Elementwise(combine="sum")
RANKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**20)
DENSITIES = st.sampled_from([0.05, 0.2, 0.29, 0.5, 0.8, 1.0])
RULES = [
    MEAN,
    SUM,
    Elementwise("trim", 0.3, "sum"),
    Elementwise("trim", 0.3, "count"),
    Elementwise("trim", 0.3, "sum", "sum"),
    Elementwise("trim", 0.4, combine="sum"),
    Elementwise("trim", 1.0, "count"),
    Elementwise("trim", 0.3, "sum", scope="adapter"),
    Isotropic(),
]
SPACES = [Knots(), Knots("v"), Delta()]


def ties(density: float) -> Elementwise:
    return Elementwise("trim", density, "sum")


def draw(client: int, name: str, seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, client, name))


def modules(updates: Updates):
    pairs, scales = [(B, A) for B, A, _ in updates], [s for _, _, s in updates]
    return lambda: [ModuleUpdates("m", pairs, scales)]


def merged(updates: Updates, space: Knots | Delta, rule: Rule, weights: list[float], alpha: float = 1.0) -> np.ndarray:
    [(_, update)] = merge_updates(modules(updates), space, rule, weights, draw, alpha)
    P, Q = update.pair()
    return (P.double() @ Q.double()).numpy()


def one_tensor(rule: Rule, parts: list[Tensor], weights: list[float], seed: int = 0) -> Tensor:
    entries = [ClientTensors("x", parts)]
    [(_, value)] = merge_tensors(lambda: entries, rule, weights, lambda k, name: draw(k, name, seed))
    return value


def near(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    assert np.abs(found - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-300)


def uneven(count: int) -> list[float]:
    return [1.0 + k for k in range(count)]


# --- merge functions -------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 5))
def test_1_the_mean_of_equal_updates_is_that_update(seed: int, clients: int) -> None:
    [update] = random_updates((3,), seed=seed)
    for space in SPACES:
        near(merged([update] * clients, space, MEAN, uneven(clients)), deltas([update])[0])


@pytest.mark.parametrize("rule", RULES)
@given(SEEDS, st.permutations(range(4)))
def test_1_the_order_of_clients_does_not_matter(rule: Rule, seed: int, order: list[int]) -> None:
    updates = random_updates((2, 3, 1, 2), seed=seed, scales=(1.0, 0.5, 2.0, 1.5))
    weights = uneven(4)
    shuffled, shuffled_weights = [updates[k] for k in order], [weights[k] for k in order]
    for space in (Delta(), Knots()):  # trimming V itself is not unique where rows of V are
        near(merged(shuffled, space, rule, shuffled_weights), merged(updates, space, rule, weights), 1e-8)


@pytest.mark.parametrize("rule", RULES)
@given(SEEDS)
def test_1_merging_the_opposite_of_all_updates_gives_the_opposite(rule: Rule, seed: int) -> None:
    """With an even number of clients, so that counts of signs tie. The sign of a singular vector is nobody's."""
    updates = random_updates((2, 3, 1, 2), seed=seed, scales=(1.0, 0.5, 2.0, 1.5))
    opposite = [(-B, A, s) for B, A, s in updates]
    for space in SPACES:
        near(merged(opposite, space, rule, uneven(4)), -merged(updates, space, rule, uneven(4)), 1e-8)


@given(SEEDS, st.integers(1, 4))
def test_2_ties_of_agreeing_signs_without_trimming_is_the_weighted_mean(seed: int, clients: int) -> None:
    random = torch.Generator().manual_seed(seed)
    sign = torch.randn(5, 7, generator=random).sign()
    parts = [sign * (torch.rand(5, 7, generator=random, dtype=torch.float64) + 0.01) for _ in range(clients)]
    expected = oracle.mean([part.numpy() for part in parts], uneven(clients))
    near(one_tensor(ties(1.0), parts, uneven(clients)).numpy(), expected, 1e-14)


@given(SEEDS, DENSITIES, st.sampled_from([1, 7, 10, 100, 1000]), st.booleans())
def test_2_trimming_keeps_exactly_as_many_entries_as_it_says(seed: int, density: float, size: int, equal: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 4, (size,), generator=random).double() if equal else torch.rand(size, generator=random)
    kept, _ = trim(values, cut_of(values, kept_count(density, size)))
    assert int((kept != 0).sum()) == max(1, int(density * size + 1e-9))
    np.testing.assert_array_equal(kept.numpy(), oracle.trimmed(values.numpy(), density))


@given(SEEDS, DENSITIES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_2_a_cut_found_in_a_stream_is_the_cut_of_all_tensors_together(
    seed: int, density: float, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=random).to(dtype) for shape in ((3, 5), (4,), (2, 9))]
    together = torch.cat([tensor.flatten() for tensor in tensors])
    [cut] = cuts_of_stream(lambda: ([tensor] for tensor in tensors), density)
    assert cut == cut_of(together, kept_count(density, len(together)))
    pieces: list[Tensor] = []
    for tensor in tensors:
        piece, cut = trim(tensor, cut)
        pieces.append(piece.flatten())
    assert torch.equal(torch.cat(pieces), trim(together, cut_of(together, kept_count(density, len(together))))[0])


@given(SEEDS, DENSITIES)
def test_2_ties_agrees_with_the_textbook_entry_by_entry(seed: int, density: float) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = [torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(3)]
    weights = [0.2, 1.0, 0.7]
    found = one_tensor(ties(density), parts, weights)
    near(found.numpy(), oracle.ties([part.numpy() for part in parts], weights, density), 1e-12)
    elected = sum(w * torch.from_numpy(oracle.trimmed(p.numpy(), density)) for w, p in zip(weights, parts, strict=True))
    assert bool((found.sign() == torch.as_tensor(elected).sign()).logical_or(found == 0).all())


@given(SEEDS)
def test_2_ties_of_one_client_without_trimming_is_that_client(seed: int) -> None:
    part = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(one_tensor(ties(1.0), [part], [3.0]), part)


@given(SEEDS)
def test_3_dare_that_drops_nothing_is_the_mean_bit_for_bit(seed: int) -> None:
    parts = [u[0] for u in random_updates(seed=seed)]
    assert torch.equal(one_tensor(Elementwise("drop", 1.0), parts, [1, 2, 3]), one_tensor(MEAN, parts, [1, 2, 3]))


@pytest.mark.parametrize("density", [0.2, 0.7])
def test_3_dare_is_unbiased_and_repeats(density: float) -> None:
    """An entry x has variance x^2 (1 - rho) / rho, so the mean of n draws of N entries is off by about
    sqrt((1 - rho) / (rho n)) of its norm: 0.063 for rho = 0.2 and n = 1000; a missing 1 / rho would be 0.8."""
    part = torch.randn(20, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = [one_tensor(Elementwise("drop", density), [part], [1.0], seed) for seed in range(1000)]
    off = float((torch.stack(draws).mean(0) - part).norm() / part.norm())
    assert off < 1.2 * ((1 - density) / density / 1000) ** 0.5
    assert torch.equal(draws[7], one_tensor(Elementwise("drop", density), [part], [1.0], 7))
    assert not torch.equal(draws[7], draws[8])
    kept = torch.stack(draws[:50]) != 0
    assert abs(float(kept.double().mean()) - density) < 0.02


def test_3_dare_drops_different_entries_for_each_client() -> None:
    part = torch.ones(40, 40)
    both = one_tensor(Elementwise("drop", 0.5), [part, part], [1.0, 1.0])
    assert {0.0, 1.0, 2.0} == set(both.unique().tolist())


def test_3_dare_drops_different_entries_of_each_tensor() -> None:
    """Tensors of one shape, such as those of equal layers, would else all lose the same places."""
    entries = [ClientTensors(name, [torch.ones(40, 40)]) for name in ("one", "two")]
    (_, one), (_, two) = merge_tensors(lambda: entries, Elementwise("drop", 0.5), [1.0], draw)
    assert 0.4 < float((one == two).float().mean()) < 0.6


@given(SEEDS, RANKS, st.floats(0.1, 3.0))
def test_4_iso_c_has_equal_singular_values_in_the_subspaces_of_the_mean(
    seed: int, ranks: list[int], alpha: float
) -> None:
    updates = random_updates(ranks, seed=seed)
    weights = uneven(len(ranks))
    average = oracle.mean(deltas(updates), weights)
    u, sigma, vh = np.linalg.svd(average, full_matrices=False)
    rank = min(sum(ranks), 11)
    assume(sigma[rank - 1] > 1e-3 * sigma[0])
    found = merged(updates, Delta(), Isotropic(), weights, alpha)
    flat = np.linalg.svd(found, compute_uv=False)
    near(flat[:rank], np.full(rank, alpha * sigma[:rank].mean()))
    near(found, alpha * sigma[:rank].mean() * u[:, :rank] @ vh[:rank], 1e-9)
    assert abs(flat.sum() - alpha * sigma.sum()) < 1e-9 * sigma.sum()  # the nuclear norm is kept


@given(SEEDS, st.integers(1, 6))
def test_4_iso_c_keeps_the_directions_that_were_largest_before_flattening(seed: int, kept: int) -> None:
    updates = random_updates((2, 2, 3), seed=seed)
    average = oracle.mean(deltas(updates), [1.0] * 3)
    u, sigma, vh = np.linalg.svd(average, full_matrices=False)
    assume(sigma[6] > 1e-3 * sigma[0] and sigma[kept - 1] > 1.01 * sigma[kept])
    levels = {"rank": sigma[:7].mean(), "kept": sigma[:kept].mean(), "full": sigma[:7].sum() / 11}
    for mode, level in levels.items():
        [(_, update)] = merge_updates(modules(updates), Delta(), Isotropic(mode), [1.0] * 3, draw)  # type: ignore[arg-type]
        done = finish(update, kept, 0.5, torch.Generator())
        near((0.5 * done.B @ done.A).numpy(), level * u[:, :kept] @ vh[:kept], 1e-9)
        assert abs(done.energy - kept / 7) < 1e-12


# --- spaces ----------------------------------------------------------------------------------------------------------


@given(SEEDS, RANKS, st.sampled_from([(13, 11), (4, 17), (17, 4), (1, 6), (6, 1)]))
def test_6_the_shared_basis_holds_every_client_exactly(seed: int, ranks: list[int], shape: tuple[int, int]) -> None:
    updates = random_updates(ranks, *shape, seed=seed, scales=uneven(len(ranks)))
    basis = shared_basis([(B, A) for B, A, _ in updates], [s for _, _, s in updates])
    U, eye = basis.left, torch.eye(basis.rank, dtype=torch.float64)
    size = float(basis.sigma[0])
    for k, delta in enumerate(deltas(updates)):
        assert np.abs((U @ basis.coordinates(k)).numpy() - delta).max() < 1e-12 * size
        assert np.abs((U * basis.sigma @ basis.directions(k)).numpy() - delta).max() < 1e-12 * size
    torch.testing.assert_close(U.T @ U, eye, rtol=0, atol=1e-12)
    gram = sum(basis.directions(k) @ basis.directions(k).T for k in range(len(ranks)))
    torch.testing.assert_close(gram, eye, rtol=0, atol=1e-12)
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


@given(SEEDS, RANKS)
def test_7_linear_rules_in_any_basis_are_sums_of_products(seed: int, ranks: list[int]) -> None:
    updates = random_updates(ranks, seed=seed, scales=uneven(len(ranks)))
    weights = uneven(len(ranks))
    parts = deltas(updates)
    for space in SPACES:
        near(merged(updates, space, MEAN, weights), oracle.mean(parts, weights))
        near(merged(updates, space, SUM, [1.0] * len(parts), 0.3), 0.3 * np.sum(parts, axis=0))
    # Also where the basis is really used: coordinates merged and taken back.
    basis = shared_basis([(B, A) for B, A, _ in updates], [s for _, _, s in updates])
    share = [w / sum(weights) for w in weights]
    M = sum(p * basis.coordinates(k) for k, p in enumerate(share))
    near((basis.left @ M).numpy(), oracle.mean(parts, weights))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@given(SEEDS, RANKS)
def test_8_low_rank_decompositions_agree_with_dense_ones(
    dtype: torch.dtype, tolerance: float, seed: int, ranks: list[int]
) -> None:
    updates = random_updates(ranks, seed=seed, dtype=dtype)
    pairs: list[Pair] = [(B, A) for B, A, _ in updates]
    parts = deltas(updates)
    _, sigma, _ = oracle.stack_svd(parts)
    assume(sigma[-1] > 1e-2 * sigma[0])
    basis = shared_basis(pairs, [1.0] * len(pairs), None, dtype)
    assert basis.sigma.dtype == dtype
    assert np.abs(basis.sigma.numpy() - sigma).max() < tolerance * sigma[0]
    average = oracle.mean(parts, [1.0] * len(parts))
    values = np.linalg.svd(average, compute_uv=False)
    found = spectrum(stack(pairs, [1 / len(pairs)] * len(pairs)), 2, dtype)
    assert np.abs(found.sigma.numpy() - values[: len(found.sigma)]).max() < tolerance * values[0]
    if len(values) > 2 and values[1] > 1.1 * values[2]:
        B, A = found.balanced()
        assert np.abs((B @ A).numpy() - oracle.best(average, 2)).max() < 20 * tolerance * values[0]
    rank = min(sum(ranks), 11)
    if values[rank - 1] > 0.05 * values[0]:
        flat = merged(updates, Delta(dtype), Isotropic(), [1.0] * len(parts))
        assert np.abs(flat - oracle.iso_c(average, 1e-6)).max() < 50 * tolerance * values[0]


@given(SEEDS, RANKS, st.integers(1, 14), st.floats(0.1, 4.0))
def test_9_truncation_is_best_balanced_and_exact_where_the_rank_suffices(
    seed: int, ranks: list[int], rank: int, scale: float
) -> None:
    updates = random_updates(ranks, seed=seed)
    average = oracle.mean(deltas(updates), [1.0] * len(ranks))
    values = np.linalg.svd(average, compute_uv=False)
    assume(rank >= 11 or values[rank] < 1e-12 * values[0] or values[rank - 1] > 1.001 * values[rank])
    [(_, update)] = merge_updates(modules(updates), Knots(), MEAN, [1.0] * len(ranks), draw)
    done = finish(update, rank, scale, torch.Generator().manual_seed(0))
    assert done.B.shape == (13, rank) and done.A.shape == (rank, 11)
    near((scale * done.B @ done.A).numpy(), oracle.best(average, rank))
    kept = min(rank, sum(ranks), 11)
    gram = np.diag(values[:kept] / scale)
    near((done.B.T @ done.B).numpy()[:kept, :kept], gram, 1e-9)
    near((done.A @ done.A.T).numpy()[:kept, :kept], gram, 1e-9)
    assert done.filled == rank - kept
    assert not bool(done.B[:, kept:].any()) and bool((done.A[kept:].abs().amax(1) > 0).all())
    assert abs(done.energy - (values[:kept] ** 2).sum() / (values**2).sum()) < 1e-12
    assert abs(done.norm - np.linalg.norm(average)) < 1e-10 * done.norm


@given(SEEDS)
def test_9_truncation_and_knots_do_not_depend_on_the_gauge_of_a_client(seed: int) -> None:
    updates = random_updates((3, 2), seed=seed)
    random = torch.Generator().manual_seed(seed + 1)
    turned: Updates = []
    for B, A, s in updates:
        G = torch.eye(len(A), dtype=torch.float64) + 0.3 * torch.randn(len(A), len(A), generator=random).double()
        assume(float(torch.linalg.cond(G)) < 50)
        turned.append((B @ torch.linalg.inv(G), G @ A, s))
    for rule in (MEAN, ties(0.3), Isotropic()):
        near(merged(turned, Knots(), rule, [1.0, 2.0]), merged(updates, Knots(), rule, [1.0, 2.0]), 1e-8)
    [(_, first)] = merge_updates(modules(updates), Delta(), MEAN, [1.0, 2.0], draw)
    [(_, other)] = merge_updates(modules(turned), Delta(), MEAN, [1.0, 2.0], draw)
    mine, its = (finish(update, 2, 1.0, torch.Generator()) for update in (first, other))
    torch.testing.assert_close(mine.B, its.B, rtol=1e-8, atol=1e-8)


@given(SEEDS, RANKS)
def test_10_iso_c_in_the_shared_basis_is_that_of_the_dense_mean(seed: int, ranks: list[int]) -> None:
    updates = random_updates(ranks, seed=seed)
    average = oracle.mean(deltas(updates), uneven(len(ranks)))
    values = np.linalg.svd(average, compute_uv=False)
    rank = min(sum(ranks), 11)
    assume(values[rank - 1] > 1e-3 * values[0])
    near(merged(updates, Knots(), Isotropic(), uneven(len(ranks))), oracle.iso_c(average), 1e-9)


@given(SEEDS)
def test_10_iso_c_of_the_bare_directions_is_not_isotropic(seed: int) -> None:
    """With "v", Sigma multiplies after flattening: U Sigma W, whose spread is that of Sigma."""
    updates = random_updates((2, 2, 2), seed=seed)
    U, sigma, directions = oracle.stack_svd(deltas(updates))
    flat = oracle.iso_c(oracle.mean(directions, [1.0] * 3))
    near(merged(updates, Knots("v"), Isotropic(), [1.0] * 3), (U * sigma) @ flat, 1e-8)


@given(SEEDS, DENSITIES, st.sampled_from(["sigma_v", "v"]))
def test_10_ties_in_knots_is_the_textbook_and_invariant_to_flipped_singular_vectors(
    seed: int, density: float, what: str
) -> None:
    updates = random_updates((2, 3, 2), seed=seed, scales=(1.0, 2.0, 0.5))
    U, sigma, directions = oracle.stack_svd(deltas(updates))
    assume(bool((sigma[:-1] > 1.001 * sigma[1:]).all()))
    left = U if what == "sigma_v" else U * sigma
    for flip in (np.ones(len(sigma)), (-1.0) ** np.arange(len(sigma))):
        inputs = [(sigma if what == "sigma_v" else 1.0) * flip for _ in directions]
        parts = [np.reshape(row, (-1, 1)) * V for row, V in zip(inputs, directions, strict=True)]
        expected = (left * flip) @ oracle.ties(parts, [1.0, 2.0, 1.0], density)
        near(merged(updates, Knots(what), ties(density), [1.0, 2.0, 1.0]), expected, 1e-8)  # type: ignore[arg-type]


@given(SEEDS, st.sampled_from(["sigma_v", "v"]))
def test_10_both_inputs_of_knots_agree_without_trimming(seed: int, what: str) -> None:
    """Sign election and the disjoint mean are not changed by positive factors of rows."""
    updates = random_updates((2, 3), seed=seed)
    near(merged(updates, Knots(what), ties(1.0), [1.0, 1.0]), merged(updates, Knots(), ties(1.0), [1.0, 1.0]), 1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [*RULES, Elementwise("drop", 0.5), Elementwise("drop", 0.5, "sum")])
@pytest.mark.parametrize("space", SPACES)
def test_11_doubling_alpha_doubles_the_update(space: Knots | Delta, rule: Rule) -> None:
    updates = random_updates((2, 3, 1), scales=(1.0, 0.5, 3.0))
    once, twice = (merged(updates, space, rule, uneven(3), alpha) for alpha in (1.0, 2.0))
    near(twice, 2 * once, 1e-12)
    assert np.abs(once).max() > 0


@pytest.mark.parametrize("rule", RULES)
def test_11_doubling_alpha_in_factors_doubles_the_product(rule: Rule) -> None:
    updates = random_updates((2, 2, 2))
    products: list[Tensor] = []
    for alpha in (1.0, 2.0):
        [(_, (B, A))] = merge_factors(modules(updates), rule, uneven(3), draw, alpha)
        products.append(B @ A)
    torch.testing.assert_close(products[1], 2 * products[0], rtol=1e-12, atol=1e-12)


@given(SEEDS, st.sampled_from(SPACES), st.sampled_from(RULES))
def test_11_splitting_a_scale_between_factor_and_scaling_changes_nothing(
    seed: int, space: Knots | Delta, rule: Rule
) -> None:
    updates = random_updates((2, 3), seed=seed, scales=(0.5, 4.0))
    moved: Updates = [(s * B, A, 1.0) for B, A, s in updates]
    near(merged(moved, space, rule, [1.0, 1.0]), merged(updates, space, rule, [1.0, 1.0]), 1e-8)


@pytest.mark.parametrize("rule", [*RULES, Elementwise("drop", 0.5)])
@pytest.mark.parametrize("space", SPACES)
def test_11_clients_that_learnt_nothing_give_an_update_of_zero(space: Knots | Delta, rule: Rule) -> None:
    updates: Updates = [(torch.zeros_like(B), A, s) for B, A, s in random_updates((2, 3))]
    [(_, update)] = merge_updates(modules(updates), space, rule, [1.0, 1.0], draw, 1.0)
    spare = torch.ones(2, 11)
    done = finish(update, 2, 1.0, torch.Generator().manual_seed(0), spare)
    assert not bool(done.B.any()) and done.norm == 0 and done.energy == 1
    assert torch.equal(done.A.float(), spare)


@given(SEEDS)
def test_11_one_client_that_learnt_nothing_is_only_a_weight(seed: int) -> None:
    updates = random_updates((2, 3), seed=seed)
    updates[1] = (torch.zeros_like(updates[1][0]), updates[1][1], 1.0)
    for space in SPACES:
        near(merged(updates, space, MEAN, [1.0, 3.0]), deltas(updates)[0] / 4)


def test_the_cut_of_an_adapter_without_entries_keeps_nothing() -> None:
    [cut] = cuts_of_stream(lambda: [[torch.empty(0, 4)]], 0.5)
    assert cut == Cut(0.0, 0)
    entries = [ClientTensors("x", [torch.empty(0, 4)])]
    [(_, value)] = apply_elementwise(Elementwise("trim", 0.5, "sum"), lambda: entries, [1.0], draw)
    assert value.shape == (0, 4)
