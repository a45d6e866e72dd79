"""What protects single examples at a site, apart from any method: what a configuration says of privacy, what an update
reads of records, and what stands between them and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from befit.core.chance import Chance
from befit.core.errors import RunError
from befit.protocol.accountant import Release, epsilon, together
from befit.protocol.settings import PrivacySettings

if TYPE_CHECKING:
    from befit.tasks.base import Examples


@dataclass(frozen=True)
class Gradients:
    """An update that computes nothing from records but gradients in training, by `befit.train.loop.training`, once.

    passes       that it trains at most, each taking a step on every batch; 0 where it reads no records
    in_sequence  each pass goes over batches of its own
    """

    passes: int = 1
    in_sequence: bool = False


@dataclass(frozen=True)
class Privacy:
    """What a configuration says of a client's privacy.

    rounds  the configuration's, for stages that do not say their own
    most    rounds of any stage, where the configuration limits them
    """

    settings: PrivacySettings
    rounds: int
    most: int | None = None

    @property
    def by_example(self) -> bool:
        return self.settings.unit == "example"

    def spends(self, releases: Sequence[Release]) -> float:
        assert self.settings.delta is not None
        return epsilon(together(releases), self.settings.delta, self.settings.accountant)

    def rounds_of(self, wanted: int | None) -> int:
        """Rounds of a stage that asks for so many."""
        rounds = self.rounds if wanted is None else wanted
        return rounds if self.most is None else min(rounds, self.most)


@dataclass
class Mechanism:
    """What stands between a client's records and its update in one message's rounds.

    noise     standard deviation of the noise, in multiples of `clip`
    chance    where noise and batches come from
    examples  the client's records, by split
    left      steps that training may still take in this round
    declared  what the stage says that it reads
    """

    noise: float
    clip: float
    rate: float
    chance: Chance
    examples: Callable[[str], Examples]
    declared: Gradients
    left: int = 0

    def take(self, passes: int, steps: int, in_sequence: bool, split: str) -> None:
        """Begin a training. Raises RunError for one that is more than what was counted."""
        wanted = steps * passes if self.declared.in_sequence else steps
        as_declared = in_sequence == self.declared.in_sequence or passes == 1
        if split != "train" or passes > self.declared.passes or not as_declared or wanted > self.left:
            raise RunError(
                f"{passes} passes of {steps} steps on the {split} examples are not what the stage declares to read "
                f"({self.declared}), so their privacy was not counted; the method's stage has to say `reads` otherwise"
            )
        self.left -= wanted

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Places of the examples of each step: every one is in it with the same probability, by itself."""
        count = len(self.examples("train"))
        for _ in range(steps):
            yield (self.chance.uniform(count) <= self.rate).nonzero().flatten()

    @property
    def size(self) -> float:
        """Expected examples of a batch, which sums are divided by."""
        return self.rate * len(self.examples("train"))
