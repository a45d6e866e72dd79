"""A client whose data arrives over time: the batches of a round come from what it has seen by then.

Nothing of it is stored. Which records a round brings, and which of those seen so far its batches are made of, follows
from seed, stage, client and round alone; who resumes plays the earlier rounds' draws again, without training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from befit.core.errors import DataError
from befit.core.seeds import derive_seed
from befit.data.streams import by_task, round_batches

if TYPE_CHECKING:
    from befit.core.values import Tick
    from befit.data.federation import Record

__all__ = ["Stream"]

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
        return (torch.from_numpy(batch) for batch in drawn)
