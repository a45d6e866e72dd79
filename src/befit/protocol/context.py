"""What a method is to run on, and what is wrong between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from befit.adapters.layout import ModelShapes
from befit.data.federation import Federation
from befit.protocol.mechanism import Privacy
from befit.protocol.settings import Asynchronous, GuardSettings, SecureSums, TrainSettings, WireSettings


@dataclass(frozen=True, slots=True)
class Problem:
    """severity  an "error" refuses a run before it starts; a "warning" is told to the user
    key       the option or setting that it is about; empty where it concerns several
    """

    severity: Literal["error", "warning"]
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass(frozen=True)
class Context:
    """What a method is to run on, as far as it is known before a run.

    families    the family of every client and newcomer that takes part or is measured, by its name in the configuration
    shapes      of each family's model; of none or some of them where models have not been looked at
    cohort      clients in a round; None: all of them
    max_weight  largest share of one client in a mean by examples
    wire        how arrays travel
    secure_sums  how the server learns sums alone; None: it sees every update
    privacy     what is protected; None where nothing is
    asynchronous  how rounds end before all have answered; None where they do not
    started     whether training starts from an adapter that somebody has trained before
    streams     whether training data arrive over the rounds
    """

    federation: Federation
    families: Mapping[str, str]
    train: TrainSettings
    shapes: Mapping[str, ModelShapes] = field(default_factory=dict[str, ModelShapes])
    guard: GuardSettings = GuardSettings()  # noqa: RUF009 frozen
    cohort: int | None = None
    max_weight: float | None = None
    wire: WireSettings = WireSettings()  # noqa: RUF009 frozen
    secure_sums: SecureSums | None = None
    privacy: Privacy | None = None
    asynchronous: Asynchronous | None = None
    started: bool = False
    streams: bool = False

    def members(self, family: str) -> list[str]:
        """The clients and newcomers of a family."""
        return [client for client, name in self.families.items() if name == family]
