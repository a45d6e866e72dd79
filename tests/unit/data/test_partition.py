"""The partitioners: what they keep for any labels, and what each rule means (docs/benchmarks.md)."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from befit.core.errors import DataError
from befit.data.partition import (
    dirichlet_class,
    dirichlet_shares,
    generator,
    iid,
    lda_equal,
    natural,
    partition_hash,
    redraw_until,
    shards,
    shares_as,
    split_by_shares,
)

labels_of = st.lists(st.integers(0, 4), min_size=40, max_size=120)
seeds = st.integers(0, 2**32)


def partitions(labels, clients, seed):
    return {
        "dirichlet_class": dirichlet_class(labels, clients, 1.0, seed, "test", minimum=0),
        "lda_equal": lda_equal(labels, clients, 0.5, seed, "test"),
        "shards": shards(labels, clients, 2, seed, "test"),
        "iid": iid(len(labels), clients, seed, "test"),
    }


def largest_share(labels, parts):
    labels = np.asarray(labels)
    return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])


@settings(max_examples=40, deadline=None)
@given(labels_of, st.integers(1, 10), seeds)
def test_every_index_is_in_exactly_one_part_of_every_partition(labels, clients, seed):
    for name, parts in partitions(labels, clients, seed).items():
        assert len(parts) == clients, name
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels))), name


@settings(max_examples=20, deadline=None)
@given(labels_of, st.integers(2, 10), seeds)
def test_the_same_seed_gives_the_same_hash_and_another_seed_another(labels, clients, seed):
    first, again, other = (partitions(labels, clients, one) for one in (seed, seed, seed + 1))
    for name in first:
        assert partition_hash(first[name]) == partition_hash(again[name]), name
    assert partition_hash(first["iid"]) != partition_hash(other["iid"])


@settings(max_examples=20, deadline=None)
@given(labels_of, st.integers(1, 10), seeds)
def test_lda_equal_and_iid_give_sizes_that_differ_by_at_most_one(labels, clients, seed):
    for name in ("lda_equal", "iid"):
        sizes = [len(part) for part in partitions(labels, clients, seed)[name]]
        assert max(sizes) - min(sizes) <= 1, name


@settings(max_examples=20, deadline=None)
@given(labels_of, seeds)
def test_one_client_gets_everything_in_order(labels, seed):
    for name, (part,) in partitions(labels, 1, seed).items():
        assert part.tolist() == list(range(len(labels))), name


def test_federation_and_stage_have_streams_of_their_own():
    drawn = {tuple(generator(0, *names).integers(0, 2**32, 4)) for names in [("a", "x"), ("a", "y"), ("b", "x")]}
    drawn.add(tuple(generator(0, "a", "x", attempt=1).integers(0, 2**32, 4)))
    assert len(drawn) == 4


def test_the_generator_is_pcg64_seeded_by_federation_stage_and_attempt():
    """SeedSequence([seed, crc32(federation), crc32(stage), attempt])."""
    sequence = np.random.SeedSequence([7, zlib.crc32(b"digits"), zlib.crc32(b"train"), 3])
    expected = np.random.Generator(np.random.PCG64(sequence)).random(3)
    assert generator(7, "digits", "train", 3).random(3).tolist() == expected.tolist()


def test_partitions_neither_use_nor_move_numpys_global_state():
    np.random.seed(0)
    expected = np.random.random(3).tolist()
    np.random.seed(0)
    first = partitions([0, 1] * 30, 5, 0)
    assert np.random.random(3).tolist() == expected
    assert partition_hash(partitions([0, 1] * 30, 5, 0)["shards"]) == partition_hash(first["shards"])


def test_a_huge_alpha_gives_every_client_its_equal_share_of_every_class():
    labels = np.repeat(np.arange(4), 100)
    for part in dirichlet_class(labels, 8, 1e9, 0, "test"):
        counts = np.bincount(labels[part], minlength=4)
        assert np.abs(counts - 100 / 8).max() <= 1


def test_a_tiny_alpha_puts_most_classes_on_one_client_each():
    labels = np.repeat(np.arange(50), 100)
    parts = dirichlet_class(labels, 5, 0.01, 0, "test", minimum=0)
    counts = np.array([np.bincount(labels[part], minlength=50) for part in parts])
    assert np.mean(counts.max(axis=0) > 90) > 0.8


def test_the_largest_class_share_falls_with_alpha():
    labels = np.repeat(np.arange(10), 100)
    shares = [largest_share(labels, dirichlet_class(labels, 10, alpha, 0, "test", minimum=1)) for alpha in (0.1, 1, 10)]
    assert shares[0] > shares[1] > shares[2]
    equal = [largest_share(labels, lda_equal(labels, 10, alpha, 0, "test")) for alpha in (0.1, 1, 10)]
    assert equal[0] > equal[1] > equal[2]


def test_the_same_shares_divide_train_and_test_alike_within_rounding():
    rng = generator(0, "test", "shares")
    shares = dirichlet_shares(3, 4, 0.5, rng)
    for count in (100, 1000):
        labels = np.repeat(np.arange(3), count)
        for client, part in enumerate(split_by_shares(labels, shares, rng)):
            held = np.bincount(labels[part], minlength=3)
            assert np.abs(held - count * shares[:, client]).max() < 1


def test_rounding_gives_leftovers_to_the_largest_remainders():
    """7 records by .5, .3, .2: 3.5, 2.1, 1.4 is floored to 3, 2, 1; the one left over goes to .5."""
    parts = split_by_shares([0] * 7, np.array([[0.5, 0.3, 0.2]]), generator(0, "test", "x"))
    assert [len(part) for part in parts] == [4, 2, 1]


def test_an_lda_client_follows_its_own_mixture():
    """The first of ten clients draws its 2,000 labels from classes that are never empty."""
    labels = np.repeat(np.arange(4), 5000)
    mixtures = np.array([[0.7, 0.1, 0.1, 0.1]] + [[0.25] * 4] * 9)
    first = lda_equal(labels, 10, 0.5, 0, "test", mixtures=mixtures)[0]
    counts = np.bincount(labels[first], minlength=4)
    expected = 2000 * mixtures[0]
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = .001


def test_train_and_test_with_given_mixtures_share_each_clients_taste():
    mixtures = np.roll(np.diag([0.97] * 4) + 0.01 * (1 - np.eye(4)), 1, axis=1)
    for stage, count in (("train", 1000), ("test", 200)):
        labels = np.repeat(np.arange(4), count)
        parts = lda_equal(labels, 4, 0.5, 1, "test", stage, mixtures)
        assert [np.bincount(labels[part]).argmax() for part in parts] == [1, 2, 3, 0]


def test_lda_refuses_a_class_that_has_no_share_in_the_mixtures():
    with pytest.raises(DataError, match="class 2 of test train has no share in mixtures of 2 classes"):
        lda_equal([0, 1, 2], 1, 0.5, 0, "test", mixtures=np.full((1, 2), 0.5))


def test_lda_deals_what_is_left_to_clients_whose_mixture_has_nothing_of_it():
    """The second of two clients has all of its class, and takes the rest of the other's."""
    labels = np.repeat([0, 1], [30, 10])
    first, second = lda_equal(labels, 2, 0.5, 0, "test", mixtures=np.eye(2))
    assert np.bincount(labels[first]).tolist() == [20] and np.bincount(labels[second]).tolist() == [10, 10]


def test_further_examples_are_dealt_as_those_before_and_those_of_a_new_class_equally():
    dealt = np.repeat([0, 2], [40, 20])
    parts = [np.arange(30), np.arange(30, 60)]
    labels = np.repeat([0, 1, 2], [8, 6, 10])
    held = [
        np.bincount(labels[part], minlength=3).tolist()
        for part in shares_as(dealt, parts, labels, generator(0, "test", "test"))
    ]
    assert held == [[6, 3, 0], [2, 3, 10]]


def test_two_shards_hold_at_most_three_classes_of_equal_size():
    labels = np.repeat(np.arange(10), 100)
    for part in shards(labels, 10, 2, 0, "test"):
        assert len(part) == 100
        assert len(np.unique(labels[part])) <= 3


def test_natural_groups_stay_whole_in_order_of_first_appearance():
    groups, dropped = natural(["b", "a", "b", "c", "a", "b"], minimum=2)
    assert {name: part.tolist() for name, part in groups.items()} == {"b": [0, 2, 5], "a": [1, 4]}
    assert list(groups) == ["b", "a"]
    assert dropped == [3]


def test_redraws_stop_at_the_first_attempt_that_is_large_enough():
    """Attempt k yields k records for the first client; the third is the first with two."""
    tried = []

    def draw(rng):
        tried.append(rng.random())
        return [np.arange(len(tried) - 1), np.arange(9)]

    assert redraw_until(draw, lambda parts: len(parts[0]), 2, 0, "test", "x")[0].tolist() == [0, 1]
    assert tried == [generator(0, "test", "x", attempt).random() for attempt in range(3)]


def test_a_minimum_that_no_attempt_has_names_the_best_and_the_way_out():
    with pytest.raises(DataError, match=r"test in 1000 attempts gives every client 10 examples; the best had \d\. Use"):
        dirichlet_class([0] * 40, 4, 0.01, 0, "test", minimum=10)


def test_a_minimum_that_no_attempt_can_have_is_refused_after_one():
    tried = []

    def draw(rng):
        tried.append(rng)
        return [np.arange(20), np.arange(19)]

    with pytest.raises(DataError, match=r"the 39 examples of test are too few for 2 parts of 20\. Use fewer"):
        redraw_until(draw, lambda parts: min(map(len, parts)), 20, 0, "test", "x")
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dirichlet_class([0, 1], 3, 1.0, 0), "2 examples cannot be divided into 3 parts"),
        (lambda: dirichlet_class([], 1, 1.0, 0), "0 examples cannot be divided into 1 parts"),
        (lambda: lda_equal([0, 1], 3, 1.0, 0), "2 examples cannot be divided into 3 parts"),
        (lambda: iid(2, 0, 0), "2 examples cannot be divided into 0 parts"),
        (lambda: shards([0, 1, 2], 2, 2, 0), "3 examples cannot be divided into 4 parts"),
        (lambda: dirichlet_class([0, 1], 2, 0.0, 0), "alpha must be positive, got 0.0"),
        (lambda: lda_equal([0, 1], 2, float("nan"), 0), "alpha must be positive, got nan"),
        (lambda: dirichlet_class([0, 1], 0, 1.0, 0), "at least one client, got 0"),
        (lambda: iid(4, 2, -1), "a seed must be 0 or more, got -1"),
    ],
)
def test_impossible_demands_are_refused_with_their_values(call, words):
    with pytest.raises(DataError, match=words):
        call()


def test_the_hash_covers_order_and_boundaries_between_clients():
    assert len({partition_hash(parts) for parts in ([[1, 2], [3]], [[1], [2, 3]], [[2, 1], [3]], [[3], [1, 2]])}) == 4
    assert partition_hash([np.array([1, 2])]) == partition_hash([[1, 2]])
    assert len(partition_hash([[]])) == 64
