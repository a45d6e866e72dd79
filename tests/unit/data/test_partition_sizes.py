"""Balanced Dirichlet, quantity skew, classes and tasks per client (docs/benchmarks.md, Partitions)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from befit.core.errors import DataError
from befit.data.partition import generator, partition_hash, split_by_shares
from befit.data.partition_sizes import classes_per_client, dirichlet_balanced, quantity

labels_of = st.lists(st.integers(0, 4), min_size=40, max_size=120).filter(lambda labels: len(set(labels)) == 5)
seeds = st.integers(0, 2**32)


def everything(parts):
    return sorted(np.concatenate(parts).tolist())


@settings(max_examples=30, deadline=None)
@given(labels_of, st.integers(1, 8), seeds)
def test_balanced_dirichlet_divides_everything_and_nobody_has_a_class_too_many(labels, clients, seed):
    """The largest size is below n / K plus the largest class."""
    parts = dirichlet_balanced(labels, clients, 0.5, seed, "test", minimum=0)
    assert everything(parts) == list(range(len(labels)))
    assert max(map(len, parts)) < len(labels) / clients + np.bincount(labels).max()


def test_balanced_dirichlet_is_more_balanced_than_its_shares_alone():
    """With alpha 0.1 and ten classes of 100 a plain Dirichlet leaves some of ten clients with far more than 200."""
    labels = np.repeat(np.arange(10), 100)
    for seed in range(5):
        parts = dirichlet_balanced(labels, 10, 0.1, seed, "test", minimum=0)
        assert max(map(len, parts)) < 200


def test_a_full_client_gets_nothing_of_the_next_class_even_where_rounding_leaves_some_over():
    """Two clients, classes of 10 and 1: who has 6 or more of the first is full, and the second goes to the other."""
    labels = [0] * 10 + [1]
    for seed in range(40):
        parts = dirichlet_balanced(labels, 2, 0.2, seed, "test", minimum=0)
        large = max(parts, key=len)
        if len([index for index in large if index < 10]) >= 6:
            assert 10 not in large


def test_an_alpha_that_underflows_still_gives_a_partition():
    parts = dirichlet_balanced([0, 1, 2, 3] * 10, 4, 1e-4, 3, "test", minimum=0)
    assert everything(parts) == list(range(40))


@settings(max_examples=30, deadline=None)
@given(st.integers(20, 200), st.integers(1, 5), st.integers(0, 4), seeds)
def test_quantities_add_up_and_respect_the_minimum(count, clients, minimum, seed):
    sizes = quantity(count, clients, 0.5, minimum, seed, "test")
    assert sizes.sum() == count and sizes.min() >= minimum and len(sizes) == clients


def test_a_large_beta_makes_quantities_alike_and_a_small_one_does_not():
    spread = [np.std(quantity(1000, 10, beta, 5, 0, "test")) for beta in (0.1, 1000.0)]
    assert spread[0] > 10 * spread[1]


@settings(max_examples=30, deadline=None)
@given(labels_of, st.integers(1, 8), st.integers(1, 5), seeds)
def test_a_client_has_so_many_classes_and_every_class_about_as_many_clients_as_any_other(
    labels, clients, classes, seed
):
    if clients * classes < 5 or np.bincount(labels).min() < clients:
        return
    parts = classes_per_client(labels, clients, classes, seed, "test")
    labels = np.asarray(labels)
    held = [set(labels[part].tolist()) for part in parts]
    assert everything(parts) == list(range(len(labels))) and {len(one) for one in held} == {classes}
    holders = [sum(label in one for one in held) for label in range(5)]
    assert max(holders) - min(holders) <= 1


@settings(max_examples=15, deadline=None)
@given(labels_of, seeds)
def test_one_client_gets_everything_and_a_seed_decides(labels, seed):
    rules = {
        "balanced": lambda seed, clients: dirichlet_balanced(labels, clients, 1.0, seed, "test", minimum=0),
        "classes": lambda seed, clients: classes_per_client(labels, clients, 5, seed, "test"),
    }
    for name, rule in rules.items():
        assert rule(seed, 1)[0].tolist() == list(range(len(labels))), name
        if min(np.bincount(labels)) >= 3:
            assert partition_hash(rule(seed, 3)) == partition_hash(rule(seed, 3)), name
            assert partition_hash(rule(seed, 3)) != partition_hash(rule(seed + 1, 3)), name


def test_floors_of_cumulative_sums_leave_the_rest_to_the_last():
    """7 records by .5, .3, .2: cumulative 3.5, 5.6, 7 floors to ends 3, 5, 7."""
    parts = split_by_shares([0] * 7, np.array([[0.5, 0.3, 0.2]]), generator(0, "test", "x"), "cumfloor")
    assert [len(part) for part in parts] == [3, 2, 2]
    with pytest.raises(DataError, match="rounding 'up' is not one of"):
        split_by_shares([0], np.array([[1.0]]), generator(0, "test", "x"), "up")


def test_a_class_that_is_only_in_the_test_set_is_refused_by_number():
    with pytest.raises(DataError, match="class 2 has no share; there are shares of 2 classes"):
        split_by_shares([0, 2], np.full((2, 2), 0.5), generator(0, "test", "x"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dirichlet_balanced([0, 1], 3, 1.0, 0), "2 examples cannot be divided into 3 parts"),
        (lambda: dirichlet_balanced([0, 1], 1, 0.0, 0), "alpha must be positive"),
        (lambda: quantity(10, 3, 0.0, 1, 0), "beta must be positive"),
        (lambda: quantity(10, 3, 1.0, 4, 0), "10 examples are too few for 3 clients with 4 each"),
        (lambda: classes_per_client([0, 1], 1, 1, 0), "1 clients with 1 classes each leave some of 2 classes"),
        (lambda: classes_per_client([0, 1], 2, 3, 0), "a client can have 1 to 2 classes, not 3"),
        (lambda: classes_per_client([0, 0, 1], 2, 2, 0), "class 1 has 1 examples for 2 clients"),
    ],
)
def test_impossible_demands_are_refused_with_their_values(call, words):
    with pytest.raises(DataError, match=words):
        call()
