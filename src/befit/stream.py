"""A client whose data arrives over time: the batches of a round come from what it has seen by then.

Nothing of it is stored. Which records a round brings, and which of those seen so far its batches are made of, follows
from seed, stage, client and round alone; who resumes plays the earlier rounds' draws again, without training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from befit.benchmarks.streams import Memory, Slices, by_task, dynamic_slices, memory_batches, static_slices
from befit.errors import DataError
from befit.seeds import derive_seed

if TYPE_CHECKING:
    from befit.benchmarks.base import Record
    from befit.types import Tick

__all__ = ["Stream"]

SLICES: dict[str, Callable[..., Slices]] = {"static": static_slices, "dynamic": dynamic_slices}


@dataclass
class Stream:
    """The stream of one client (FedMosaic specification, section 1: PFL-Static, PFL-Dynamic, memory-only training).

    tasks     positions of the records of each task, in the order of the stream
    kind      "dynamic" goes through the tasks one after the other, "static" through all of them mixed
    sampling  which of the records seen a batch is made of: see `memory_batches`
    """

    client: str
    tasks: Sequence[Sequence[int]]
    kind: Literal["static", "dynamic"]
    sampling: Literal["frequency", "uniform"] = "frequency"
    _reached: tuple[Tick, int, int, Memory] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, client: str, records: Sequence[Record], kind: Literal["static", "dynamic"],
           sampling: Literal["frequency", "uniform"]) -> Stream:  # fmt: skip
        """Over a client's training records, by their field `task`; records without one are one task."""
        return cls(client, list(by_task(records).values()), kind, sampling)

    def batches(self, steps: int, size: int, at: Tick) -> Iterator[Tensor]:
        """Positions for each of `steps` batches of a round. Every round of a stage takes the same number of steps.

        Raises DataError where the first rounds bring no record.
        """
        plan = np.random.default_rng(derive_seed(at.seed, "stream", at.stage, self.client))
        slices = SLICES[self.kind](self.tasks, at.rounds, plan)
        memory, first = self._memory(at, steps, size)
        drawn: list[np.ndarray] = []
        for number in range(first, at.round + 1):
            tick = replace(at, round=number, span=1)
            rng = np.random.default_rng(tick.seed_for(self.client, "stream"))
            drawn, memory = memory_batches(memory, slices[number - 1], steps, size, rng, sampling=self.sampling)
        if not drawn:
            raise DataError(f"client {self.client}: {sum(map(len, self.tasks))} records over {at.rounds} rounds leave "
                            f"round {at.round} without any; take fewer rounds, or stream.kind none")  # fmt: skip
        self._reached = replace(at, span=1), steps, size, memory
        yield from (torch.from_numpy(batch) for batch in drawn)

    def _memory(self, at: Tick, steps: int, size: int) -> tuple[Memory, int]:
        """The memory before the earliest round that has to be played, and that round."""
        if self._reached is not None:
            tick, *rest, memory = self._reached
            if rest == [steps, size] and tick.round < at.round and replace(at, round=tick.round, span=1) == tick:
                return memory, tick.round + 1
        return Memory(), 1
