"""How a round's distillation on public records goes, as one value that a configuration can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from befit.core.errors import DataError
from befit.core.schema import POSITIVE, check_fields
from befit.core.seeds import derive_seed
from befit.core.values import Tick
from befit.protocol.site import shuffled_batches
from befit.train.optim import learning_rate

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings


@dataclass(frozen=True)
class Distillation:
    """Distillation on public records, once a round (as Seo et al. 2026 run PerAda, TAKFL, FedMKT).

    samples     public records, drawn once by the run's seed, the same ones for the server and all clients
    epochs      how often they are gone through in a round
    batch_size  records in a step
    lr          learning rate; null takes the one that clients begin the round with, where train.epochs is set that of
                a client with the mean number of steps
    top         how many of the likeliest tokens a model passes on to one with another tokenizer, or over the wire
    """

    samples: Annotated[int, POSITIVE] = 80
    epochs: Annotated[int, POSITIVE] = 1
    batch_size: Annotated[int, POSITIVE] = 4
    lr: Annotated[float | None, POSITIVE] = None
    top: Annotated[int, POSITIVE] = 128

    def __post_init__(self) -> None:
        check_fields(self, "the distillation")

    def records(self, count: int, at: Tick) -> Tensor:
        """Places of the drawn records among `count` public ones, int64, in order: all of them where there are fewer.

        Raises DataError where there are none.
        """
        if not count:
            raise DataError("distillation needs public records, and there are none")
        generator = torch.Generator().manual_seed(derive_seed(at.seed, "public records"))
        return torch.randperm(count, generator=generator)[: self.samples].sort().values

    def batches(self, chosen: Tensor, at: Tick, who: str) -> Iterator[Tensor]:
        """All epochs of a round over the chosen records, shuffled by a seed of this round and of who learns."""
        generator = torch.Generator().manual_seed(at.seed_for(who, "distillation"))
        steps = self.epochs * -(-len(chosen) // self.batch_size)
        for places in shuffled_batches(len(chosen), self.batch_size, steps, generator):
            yield chosen[places]

    @property
    def passes(self) -> int:
        """Records that a round goes through, each as often as it does."""
        return self.epochs * self.samples

    def rate(self, budget: TrainSettings, at: Tick) -> float:
        return learning_rate(budget, 0, at) if self.lr is None else self.lr
