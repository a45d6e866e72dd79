"""Sites: everything that a method may touch, on a client and on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.model import AdaptedModel
from befit.errors import DataError
from befit.types import ClientInfo, State, Tick

if TYPE_CHECKING:
    from befit.config import TrainSettings
    from befit.tasks.base import Batch, Examples, Task

__all__ = ["ServerSite", "Site", "shuffled_batches"]


@dataclass
class Site:
    """One client: its model, task, data and budget. Random draws take a seed from a `Tick`.

    report  numbers for the log that `client_update` may add; they leave the client, by name
    """

    info: ClientInfo
    model: AdaptedModel
    task: Task
    budget: TrainSettings
    examples: Callable[[str], Examples]
    report: dict[str, float] = field(default_factory=dict)

    def batches(self, split: str, steps: int, at: Tick) -> Iterator[Batch]:
        """`steps` mini-batches: epochs without replacement, shuffled anew each time, by a seed of this client and tick.

        A client with fewer examples than a batch gives all of them each time.
        """
        examples = self.examples(split)
        if not len(examples):
            raise DataError(f"client {self.info.id} has no {split} examples")
        generator = torch.Generator().manual_seed(at.seed_for(self.info.id, "batches"))
        for indices in shuffled_batches(len(examples), self.budget.batch_size, steps, generator):
            yield self.to_device(examples.batch(indices))

    def to_device(self, batch: Batch) -> Batch:
        if self.model.device.type == "cpu":
            return batch
        return {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in batch.items()}

    def logits(self, batch: Batch) -> Tensor:
        return self.task.logits(self.model.backbone, batch)

    def loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.logits(batch), batch)


@dataclass(frozen=True)
class ServerSite:
    """The server: the initial adapters of the common seed, and who the clients are. It holds no private data."""

    initial: State
    clients: tuple[ClientInfo, ...]


def shuffled_batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of `steps` batches of at most `size`; an epoch's remainder is a batch of its own.

    >>> [len(batch) for batch in shuffled_batches(5, 2, 4, torch.Generator().manual_seed(0))]
    [2, 2, 1, 2]
    """
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if not len(order):
            order = torch.randperm(count, generator=generator)
        batch, order = order[:size], order[size:]
        yield batch
