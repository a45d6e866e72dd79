"""Streams of tasks: what slices and batches of FedMosaic's streams keep, and sampling by hand."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from befit.core.errors import DataError
from befit.core.seeds import derive_seed
from befit.data.streams import (
    ReplayMemory,
    by_task,
    draw,
    dynamic_slices,
    memory_batches,
    round_batches,
    static_slices,
)

SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=5)


def rng(seed=0):
    return np.random.default_rng(seed)


def tasks_of(sizes):
    """Positions of tasks that lie one after the other."""
    ends = np.cumsum([0, *sizes])
    return [list(range(start, end)) for start, end in pairwise(ends)]


@given(SIZES, st.integers(1, 30))
def test_dynamic_slices_have_every_record_once(sizes, rounds):
    slices = dynamic_slices(tasks_of(sizes), rounds, rng())
    assert len(slices) == rounds
    assert sorted(np.concatenate(slices).tolist()) == list(range(sum(sizes)))


@given(SIZES, st.integers(1, 30))
def test_dynamic_slices_keep_the_order_of_tasks(sizes, rounds):
    """The task of each record, in the order of arrival, never goes back; within a round it is a current one."""
    tasks = tasks_of(sizes)
    number = {position: index for index, task in enumerate(tasks) for position in task}
    slices = dynamic_slices(tasks, rounds, rng())
    order = [number[position] for part in slices for position in part.tolist()]
    assert order == sorted(order)
    for q, part in enumerate(slices):
        current = range(q * len(sizes) // rounds, -(-(q + 1) * len(sizes) // rounds))
        assert {number[position] for position in part.tolist()} <= set(current)


def test_five_rounds_of_each_of_four_tasks_have_twelve_new_records():
    """20 rounds, 4 tasks of 60: T / R = 1 / 5 of a task a round, 60 / 5 = 12 records, all of task q // 5."""
    slices = dynamic_slices(tasks_of([60] * 4), 20, rng())
    assert [len(part) for part in slices] == [12] * 20
    assert [set((part // 60).tolist()) for part in slices] == [{q // 5} for q in range(20)]


def test_a_round_spans_two_tasks_where_rounds_do_not_divide():
    """Two tasks of 10 and 20 over three rounds: round 1 has the shares [2/3, 1] of the first, records int(6.67) to 10,
    and [0, 1/3] of the second, 0 to int(6.67)."""
    slices = dynamic_slices(tasks_of([10, 20]), 3, rng())
    assert [len(part) for part in slices] == [6, 10, 14]
    assert int((slices[1] < 10).sum()) == 4


def test_records_within_a_task_are_shuffled_by_the_seed():
    first, again, other = (np.concatenate(dynamic_slices(tasks_of([50]), 5, rng(seed))) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert first.tolist() != sorted(first.tolist())


@given(SIZES, st.integers(1, 30))
def test_static_slices_are_equal_and_leave_out_less_than_one_a_round(sizes, rounds):
    slices = static_slices(tasks_of(sizes), rounds, rng())
    assert [len(part) for part in slices] == [sum(sizes) // rounds] * rounds
    held = np.concatenate(slices).tolist()
    assert len(set(held)) == len(held) and set(held) <= set(range(sum(sizes)))
    assert sum(sizes) - len(held) < rounds


def test_static_slices_mix_the_tasks():
    """Of 12 among 240 in 4 tasks, all of one task has a chance below 1e-6."""
    assert all(len(set((part // 60).tolist())) > 1 for part in static_slices(tasks_of([60] * 4), 20, rng()))


@pytest.mark.parametrize("sizes, rounds", [([], 3), ([4], 0)])
@pytest.mark.parametrize("slices", [dynamic_slices, static_slices])
def test_a_stream_without_tasks_or_rounds_is_refused(slices, sizes, rounds):
    with pytest.raises(DataError, match=f"got {len(sizes)} and {rounds}"):
        slices(tasks_of(sizes), rounds, rng())


def test_tasks_are_the_records_own_in_the_order_of_their_first():
    records = [{"task": "b"}, {"task": "a"}, {}, {"task": "b"}]
    assert by_task(records) == {"b": [0, 3], "a": [1], "": [2]}


# Memory


@given(
    st.lists(st.integers(0, 13), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from(["frequency", "uniform"]),
)
def test_every_round_gives_its_steps_and_every_batch_only_what_was_seen(arrivals, steps, size, sampling):
    """Also over rounds with nothing new, and where the memory is smaller than a batch; counts decay where they do."""
    memory, draws, start = ReplayMemory(), rng(), 0
    for count in arrivals:
        arriving = list(range(start, start + count))
        start += count
        before = float(memory.counts.sum())
        batches, memory = memory_batches(memory, arriving, steps, size, draws, sampling=sampling)
        assert len(batches) == (steps if start else 0)
        assert all(len(batch) == size for batch in batches)
        assert memory.positions.tolist() == list(range(start))
        for number, batch in enumerate(batches):
            # Batch k of S is due when ceil((k + 1) n / S) of the n new records have come.
            seen = start - count + -(-(number + 1) * count // steps)
            assert set(batch.tolist()) <= set(range(seen))
            assert len(set(batch.tolist())) == min(size, seen)
        if sampling == "uniform" and start >= size:
            grown = float(memory.counts.sum()) - before
            assert grown == sum(len(set(batch.tolist())) for batch in batches)


def test_counts_decay_and_then_grow_by_the_size_of_a_batch():
    """One batch of 2 of 4 records: each count times 0.99, and 1 more for the two that are drawn: the least used, since
    the others' chances are below e^-200."""
    memory = ReplayMemory(np.arange(4), np.array([1.0, 2.0, 30.0, 40.0]))
    (batch,), after = memory_batches(memory, [], 1, 2, rng())
    assert sorted(batch.tolist()) == [0, 1]
    assert after.counts.tolist() == pytest.approx([1.99, 2.98, 29.7, 39.6])


def test_frequency_sampling_is_the_softmax_of_minus_eight_times_the_counts():
    """softmax(-[0, 0.1] / 0.125) = [0.690, 0.310]: 1 / (1 + e^-0.8). Four standard errors of 4000 draws are 0.029."""
    draws = rng()
    share = np.mean([draw(np.array([0.0, 0.1]), 1, draws)[0] == 0 for _ in range(4000)])
    assert share == pytest.approx(0.690, abs=0.03)


def test_all_records_are_used_about_equally_often():
    """480 draws over 60 records that are all there from the second round on: 8 each, and frequency keeps them close
    where uniform draws vary by sqrt(8) or so."""
    spread = {}
    for sampling in ("frequency", "uniform"):
        draws = rng()
        _, memory = memory_batches(ReplayMemory(), list(range(60)), 15, 4, draws, sampling=sampling)
        batches, _ = memory_batches(memory, [], 120, 4, draws, sampling=sampling)
        used = Counter(position for batch in batches for position in batch.tolist())
        assert sum(used.values()) == 480
        spread[sampling] = np.std([used[position] for position in range(60)])
    assert spread["frequency"] < 1.5 < 2.0 < spread["uniform"]


def test_a_small_memory_repeats_its_records_in_turn():
    (batch,), _ = memory_batches(ReplayMemory(), [7, 9], 1, 5, rng())
    assert batch.tolist()[:2] == batch.tolist()[2:4] and batch[4] == batch[0] and set(batch.tolist()) == {7, 9}


@pytest.mark.parametrize("order", ["dynamic", "static"])
def test_a_round_gone_through_again_is_the_round_of_one_long_run(order):
    """Against a memory that is kept; task by task only the first two tasks are known after 10 of 20 rounds."""
    tasks, seeds = tasks_of([6] * 4), derive_seed
    cut = dynamic_slices if order == "dynamic" else static_slices
    memory = ReplayMemory()
    for number, arriving in enumerate(cut(tasks, 20, rng(seeds("stream")))):
        kept, memory = memory_batches(memory, arriving, 3, 2, rng(seeds(f"round {number}")))
        again = round_batches(tasks, number, rounds=20, steps=3, batch_size=2, seeds=seeds, order=order)
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in kept]
        if number == 9:
            assert (max(memory.positions) < 12) == (order == "dynamic")
    with pytest.raises(DataError, match="there is no round 20 among 20"):
        round_batches(tasks, 20, rounds=20, steps=3, batch_size=2, seeds=seeds)


def test_counts_far_apart_do_not_underflow():
    """exp(-8 * 1000) is zero in floating point, and still there is a second record to draw."""
    memory = ReplayMemory(np.arange(3), np.array([0.0, 1000.0, 2000.0]))
    (batch,), _ = memory_batches(memory, [], 1, 3, rng())
    assert batch.tolist() == [0, 1, 2]


def test_impossible_sizes_and_memories_are_refused():
    with pytest.raises(DataError, match="must be at least 1, got 0 and 4"):
        memory_batches(ReplayMemory(), [1], 0, 4, rng())
    with pytest.raises(DataError, match=r"\(2,\) for \(3,\)"):
        ReplayMemory(np.arange(3), np.zeros(2))
