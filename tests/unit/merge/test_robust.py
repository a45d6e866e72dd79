"""Rules that a few dishonest clients cannot steer, against a library of such rules and against dense products."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from befit.core.values import State
from befit.merge.robust import (
    geometric_weights,
    least_replies,
    median,
    most_central,
    squared_distances,
    trimmed_mean,
)

CASES = json.loads((Path(__file__).parents[2] / "golden" / "data" / "robust_rules.json").read_text())["cases"]
RULES = ("median", "trimmed-mean", "geometric-median", "krum", "multi-krum")
SEEDS = st.integers(0, 2**20)


def distances(vectors: Tensor) -> Tensor:
    return squared_distances([lambda v=v: ({"s/m/x": v}, {"s/m/x": torch.zeros_like(v)}) for v in vectors])


def centre(rule: str, vectors: Tensor, attackers: int) -> Tensor:
    """What a server with equal weights makes of vectors."""
    if rule == "median":
        return median(list(vectors))
    if rule == "trimmed-mean":
        return trimmed_mean(list(vectors), attackers)
    if rule == "geometric-median":
        return torch.tensor(geometric_weights(distances(vectors)), dtype=vectors.dtype) @ vectors
    order = most_central(distances(vectors), attackers)
    return vectors[order[: 1 if rule == "krum" else len(vectors) - attackers]].mean(0)


def normal(seed: int, clients: int = 7, entries: int = 5) -> Tensor:
    return torch.randn(clients, entries, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['attackers']} of {len(case['vectors'])}")
def test_rules_give_what_the_library_gives(case: dict[str, Any], rule: str) -> None:
    found = centre(rule, torch.tensor(case["vectors"], dtype=torch.float64), case["attackers"])
    torch.testing.assert_close(found, torch.tensor(case[rule], dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@given(seed=SEEDS)
def test_the_order_of_clients_changes_nothing(rule: str, seed: int) -> None:
    vectors = normal(seed)
    shuffled = vectors[torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))]
    torch.testing.assert_close(centre(rule, shuffled, 2), centre(rule, vectors, 2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["trimmed-mean", "multi-krum"])
@given(seed=SEEDS)
def test_without_attackers_the_result_is_the_mean(rule: str, seed: int) -> None:
    vectors = normal(seed)
    torch.testing.assert_close(centre(rule, vectors, 0), vectors.mean(0))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8)  # a geometric median with such outliers takes a thousand steps
@given(seed=SEEDS)
def test_outliers_that_go_to_infinity_do_not_take_the_result_along(rule: str, seed: int) -> None:
    """From 1e4 to 1e6 times as far, the result stays where it is: exactly, but for the geometric median, which tends to
    a limit."""
    vectors, away = normal(seed), normal(seed + 1, 2)
    near, far = (centre(rule, torch.cat([scale * away, vectors[2:]]), 2) for scale in (1e4, 1e6))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-2 if rule == "geometric-median" else 0)
    assert float(far.norm()) <= 2 * float(vectors.norm(dim=1).max())


@given(seed=SEEDS)
def test_equal_updates_come_back(seed: int) -> None:
    vectors = normal(seed, 1).expand(5, -1)
    for rule in RULES:
        torch.testing.assert_close(centre(rule, vectors, 2), vectors[0])


@given(seed=SEEDS)
def test_no_step_from_the_geometric_median_lowers_the_sum_of_distances(seed: int) -> None:
    vectors = normal(seed)
    found = centre("geometric-median", vectors, 0)

    def total(point: Tensor) -> float:
        return float((vectors - point).norm(dim=1).sum())

    for step in 1e-3 * normal(seed + 1, 20):
        assert total(found) <= total(found + step) + 1e-9


def test_a_trimmed_mean_of_too_few_is_an_error() -> None:
    assert least_replies(2) == 5
    with pytest.raises(ValueError, match="leave nothing"):
        trimmed_mean([torch.zeros(1)] * 4, 2)


def adapters(seed: int, clients: int = 4) -> tuple[State, list[State]]:
    """A start and what clients made of it: two modules of rank 3, and a head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"s/one/A": (3, 8), "s/one/B": (6, 3), "s/two/A": (3, 5), "s/two/B": (7, 3), "s/head/weight": (4, 2)}
    start = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    moved = [
        {key: value + 0.05 * torch.randn(value.shape, generator=generator) for key, value in start.items()}
        for _ in range(clients)
    ]
    return start, moved


def dense_distances(start: State, replies: list[State]) -> Tensor:
    """The same by forming `B A - B_0 A_0`: the plain and the product distances, each over the median squared norm."""

    def product(state: State) -> Tensor:
        factors = {key: value.double() for key, value in state.items()}
        return torch.cat([(factors[f"s/{m}/B"] @ factors[f"s/{m}/A"]).flatten() for m in ("one", "two")])

    plain = [torch.cat([(reply[key].double() - start[key].double()).flatten() for key in start]) for reply in replies]
    products = [product(reply) - product(start) for reply in replies]
    squared = torch.zeros(len(replies), len(replies), dtype=torch.float64)
    for vectors in (plain, products):
        usual = torch.stack([vector.square().sum() for vector in vectors]).median()
        for i, j in combinations(range(len(vectors)), 2):
            squared[i, j] += (vectors[i] - vectors[j]).square().sum() / usual
            squared[j, i] = squared[i, j]
    return squared


@given(seed=SEEDS)
def test_distances_from_products_of_factors_are_those_of_dense_products(seed: int) -> None:
    start, replies = adapters(seed)
    found = squared_distances([lambda reply=reply: (reply, start) for reply in replies])
    # The plain differences are made in float32, so they carry its rounding: 1e-7 of numbers 20 times as large.
    torch.testing.assert_close(found, dense_distances(start, replies), rtol=1e-5, atol=1e-6)


def test_a_reply_of_the_same_product_by_ruinous_factors_is_far_from_the_others() -> None:
    """(30 B, A / 30) has the product of (B, A): by products alone it would be the most central reply of all."""
    start, replies = adapters(0, 5)
    wanted = most_central(squared_distances([lambda reply=reply: (reply, start) for reply in replies]), 1)[0]
    ruinous = {
        key: value * {"A": 1 / 30, "B": 30.0}.get(key.rpartition("/")[2], 1.0) for key, value in replies[wanted].items()
    }
    replies[wanted] = ruinous
    order = most_central(squared_distances([lambda reply=reply: (reply, start) for reply in replies]), 1)
    assert order[-1] == wanted


def test_a_factor_that_travels_alone_is_compared_as_it_is() -> None:
    start, replies = adapters(1)
    alone = [{"s/one/A": reply["s/one/A"]} for reply in replies]
    found = squared_distances([lambda reply=reply: (reply, {"s/one/A": start["s/one/A"]}) for reply in alone])
    flat = torch.stack([(reply["s/one/A"] - start["s/one/A"]).double().flatten() for reply in alone])
    torch.testing.assert_close(found, torch.cdist(flat, flat).square() / flat.square().sum(1).median())


def test_where_most_updates_are_zero_distances_are_over_the_longest() -> None:
    """The median of the squared norms is zero, and nothing can be divided by that: who moved would not be seen."""
    vectors = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], dtype=torch.float64)
    found = distances(vectors)
    torch.testing.assert_close(found, torch.cdist(vectors, vectors).square() / 100)
    assert most_central(found, 1) == [0, 1, 2, 3, 4]


def test_updates_that_are_all_zero_are_alike() -> None:
    found = distances(torch.zeros(3, 2))
    assert not bool(found.any()) and most_central(found, 1) == [0, 1, 2]
    assert geometric_weights(found) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("a", "b"), [((2, 4), (5, 3)), ((4,), (5,)), ((2, 4), (5,))])
def test_factors_that_have_no_product_are_compared_as_arrays(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Such as a bank of rows and a mixture of them, or vectors of scales under the same names."""
    generator = torch.Generator().manual_seed(0)
    start = {"s/m/A": torch.zeros(a), "s/m/B": torch.zeros(b)}
    replies = [{key: torch.randn(value.shape, generator=generator) for key, value in start.items()} for _ in range(3)]
    found = squared_distances([lambda reply=reply: (reply, start) for reply in replies])
    flat = torch.stack([torch.cat([reply[key].double().flatten() for key in sorted(start)]) for reply in replies])
    torch.testing.assert_close(found, torch.cdist(flat, flat).square() / flat.square().sum(1).median())
