"""Data that arrives task by task: the records that are new in a round, and batches drawn from all records so far.

PFL-Static, PFL-Dynamic and memory-only training of FedMosaic (Seo et al. 2026, Algorithm 1; slices and counts as in
snumprlab/fedmosaic), as functions of numbers of records and a random generator. Positions count a client's records in
the order of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import DataError
from befit.core.seeds import derive_seed
from befit.data.federation import Record

if TYPE_CHECKING:
    from torch import Tensor

    from befit.core.values import Tick

Slices = list[NDArray[np.int64]]

DECAY, TEMPERATURE = 0.99, 0.125  # of the counts, and of the softmax over them (the released code's)


def by_task(records: Sequence[Record]) -> dict[str, list[int]]:
    """The positions of every task's records, in the order in which tasks first appear. A record without one has ""."""
    positions: dict[str, list[int]] = {}
    for position, record in enumerate(records):
        positions.setdefault(str(record.get("task", "")), []).append(position)
    return positions


def dynamic_slices(tasks: Sequence[Sequence[int]], rounds: int, rng: np.random.Generator) -> Slices:
    """PFL-Dynamic: the records that are new in every round, task after task, each task shuffled.

    tasks   the positions of each task's records, in the order of the stream; an empty one is a time without data
    ->      `rounds` arrays of positions; every record is in exactly one

    Round q owns the share [q T / R, (q + 1) T / R) of the axis of T tasks, and of task t the records
    int(a n_t) to int(b n_t), where a to b is its part of the task. With T / R no whole number a round has two tasks.
    Raises DataError without rounds or tasks.
    """
    shuffled = [rng.permutation(np.asarray(task, dtype=np.int64)) for task in tasks]
    check(len(tasks), rounds)
    slices: Slices = []
    for number in range(rounds):
        # In units of 1 / R of a task, so that no fraction is rounded: a record is in one round and no other.
        start, end = number * len(tasks), (number + 1) * len(tasks)
        parts = [np.empty(0, np.int64)]
        for index in range(start // rounds, -(-end // rounds)):
            low, high = max(start - index * rounds, 0), min(end - index * rounds, rounds)
            task = shuffled[index]
            parts.append(task[low * len(task) // rounds : high * len(task) // rounds])
        slices.append(np.concatenate(parts))
    return slices


def static_slices(tasks: Sequence[Sequence[int]], rounds: int, rng: np.random.Generator) -> Slices:
    """PFL-Static: all tasks together, shuffled, in `rounds` parts of floor(n / R) records; the rest is left out.

    Arguments and errors as in `dynamic_slices`.
    """
    check(len(tasks), rounds)
    together = np.concatenate([np.asarray(task, dtype=np.int64) for task in tasks])
    size = len(together) // rounds
    return list(rng.permutation(together)[: size * rounds].reshape(rounds, size))


def check(tasks: int, rounds: int) -> None:
    if tasks < 1 or rounds < 1:
        raise DataError(f"a stream needs at least one task and one round, got {tasks} and {rounds}")


@dataclass(frozen=True)
class ReplayMemory:
    """What a client has seen, and how often it has learnt from each: its state between rounds.

    positions  (seen,) int64, in the order in which they came
    counts     (seen,) float64, decayed numbers of batches
    """

    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counts: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))

    def __post_init__(self) -> None:
        if self.positions.shape != self.counts.shape or self.positions.ndim != 1:
            raise DataError(
                f"a memory has one count for each position, not {self.counts.shape} for {self.positions.shape}"
            )


def memory_batches(
    memory: ReplayMemory,
    arriving: Sequence[int] | NDArray[np.int64],
    steps: int,
    batch_size: int,
    rng: np.random.Generator,
    *,
    sampling: Literal["frequency", "uniform"] = "frequency",
) -> tuple[list[NDArray[np.int64]], ReplayMemory]:
    """A round of memory-only training: new records go into the memory, and batches are drawn from the memory alone.

    arriving  the round's slice
    sampling  frequency: p = softmax(-count / 0.125), counts decaying by 0.99 a batch and growing by 1 where drawn;
              uniform: all alike, as in the paper's Algorithm 1
    ->        exactly `steps` arrays of `batch_size` positions, and the memory after them

    The batches are spread evenly over the arrival of the slice, so each holds only what has come before it. A batch
    has no record twice unless the memory is smaller than a batch: then its records are repeated in turn. Without new
    records all batches are from what is remembered; where nothing is, there are none.

    Deviation: the share of a batch that is due with each record is counted in whole numbers, so that rounding
    changes nothing. Raises DataError for sizes below one.
    """
    if steps < 1 or batch_size < 1:
        raise DataError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    new = np.asarray(arriving, dtype=np.int64)
    positions = np.concatenate([memory.positions, new])
    counts = np.concatenate([memory.counts, np.zeros(len(new))])
    frequency = sampling == "frequency"
    size, due = len(memory.positions), 0
    batches: list[NDArray[np.int64]] = []

    def emit() -> None:
        times = counts[:size]
        if frequency:
            times *= DECAY
        drawn = draw(times if frequency else np.zeros(size), min(batch_size, size), rng)
        times[drawn] += 1.0
        batches.append(positions[np.resize(drawn, batch_size)])

    for _ in new:
        size += 1
        due += steps
        for _ in range(due // len(new)):
            emit()
        due %= len(new)
    if not len(new) and size:
        for _ in range(steps):
            emit()
    return batches, ReplayMemory(positions, counts)


def round_batches(
    tasks: Sequence[Sequence[int]],
    number: int,
    *,
    rounds: int,
    steps: int,
    batch_size: int,
    seeds: Callable[[str], int],
    order: Literal["dynamic", "static"] = "dynamic",
    sampling: Literal["frequency", "uniform"] = "frequency",
) -> list[NDArray[np.int64]]:
    """The batches of round `number`, counted from 0, of a client that has trained in every round before.

    seeds  a seed for each of "stream", "round 0", "round 1", …, the same whenever it is asked

    Rounds before are gone through again, so that nothing has to be kept between rounds, and a run that is resumed goes
    on as it would have; that takes 0.03 ms a batch with 240 records, and 0.4 ms with 40,000. Other arguments and errors
    as in `memory_batches`. Raises DataError for a round that there is not.
    """
    if not 0 <= number < rounds:
        raise DataError(f"there is no round {number} among {rounds}, counted from 0")
    cut = dynamic_slices if order == "dynamic" else static_slices
    slices = cut(tasks, rounds, np.random.default_rng(seeds("stream")))
    memory, batches = ReplayMemory(), []
    for past, arriving in enumerate(slices[: number + 1]):
        rng = np.random.default_rng(seeds(f"round {past}"))
        batches, memory = memory_batches(memory, arriving, steps, batch_size, rng, sampling=sampling)
    return batches


def draw(counts: NDArray[np.float64], size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`size` different indices, one after the other with p = softmax(-counts / 0.125) over those that are left.

    The largest of `-counts / 0.125 + Gumbel noise` are such a sample (Yellott 1977), and nothing underflows where
    counts lie far apart.
    """
    keys = counts / TEMPERATURE - rng.gumbel(size=len(counts))
    first = np.argpartition(keys, size - 1)[:size]
    return first[np.argsort(keys[first])]


Kind = Literal["static", "dynamic"]
Sampling = Literal["frequency", "uniform"]


@dataclass(frozen=True)
class Stream:
    """The stream of one client (Seo et al. 2026, FedMosaic: PFL-Static, PFL-Dynamic, memory-only training).

    tasks     positions of the records of each task, in the order of the stream
    kind      "dynamic" goes through the tasks one after the other, "static" through all of them mixed
    sampling  which of the records seen a batch is made of: see `befit.data.streams.memory_batches`
    """

    client: str
    tasks: Sequence[Sequence[int]]
    kind: Kind
    sampling: Sampling = "frequency"

    @classmethod
    def of(cls, client: str, records: Sequence[Record], kind: Kind, sampling: Sampling) -> Stream:
        """Over a client's training records, by their field `task`; records without one are one task."""
        return cls(client, list(by_task(records).values()), kind, sampling)

    def batches(self, steps: int, size: int, at: Tick) -> Iterator[Tensor]:
        """Positions for each of `steps` batches of a round. Every round of a stage takes the same number of steps.

        Raises DataError where the rounds so far brought no record.
        """
        drawn = round_batches(
            self.tasks,
            at.round - 1,
            rounds=at.rounds,
            steps=steps,
            batch_size=size,
            seeds=lambda name: derive_seed(at.seed, at.stage, self.client, "stream", name),
            order=self.kind,
            sampling=self.sampling,
        )
        if not drawn:
            raise DataError(
                f"client {self.client}: {sum(map(len, self.tasks))} records over {at.rounds} rounds leave "
                f"round {at.round} without any; take fewer rounds, or stream.kind none"
            )
        import torch  # not at the top: a configuration is read without it

        return (torch.from_numpy(batch) for batch in drawn)
