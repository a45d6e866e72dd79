"""What an ablation is: rows of measurements of one seed, and what the rows of all seeds say together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from befit.report.ablation_figures import Figure
from befit.report.table import Table

if TYPE_CHECKING:
    from befit.studies.ablations.seed import Client, Seed

__all__ = ["Ablation", "Findings", "Measured", "Row", "evenly"]

Row = dict[str, Any]  # plain values: numbers, text, true, false, null


@dataclass(frozen=True)
class Findings:
    """What an ablation found: a few sentences, the most important first, and tables and figures."""

    sentences: Sequence[str]
    tables: Sequence[Table] = field(default_factory=tuple)
    figures: Sequence[Figure] = field(default_factory=tuple)


def evenly(total: int, count: int = 10) -> tuple[int, ...]:
    """At most `count` rounds at equal distances, the last one included.

    >>> evenly(60), evenly(3)
    ((6, 12, 18, 24, 30, 36, 42, 48, 54, 60), (1, 2, 3))
    """
    return tuple(sorted({-(-total * place // count) for place in range(1, count + 1)}))


class Ablation(ABC):
    """A frozen dataclass of options.

    splits  splits of which every client needs examples
    """

    splits: ClassVar[tuple[str, ...]] = ()

    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of the method, by dotted key, of every run that it compares, by the run's label."""
        return {}

    def checkpoints(self, total: int) -> Sequence[int]:
        """Which of `total` federated rounds to keep: ten, so that one ablation can use what another trained."""
        return evenly(total)

    @abstractmethod
    def rows(self, seed: Seed) -> Iterator[Row]:
        """Rows of plain values, client by client; the seed is added."""

    @abstractmethod
    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        """What all rows say. `metric` is the name of the score; higher is better."""


class Measured(Ablation):
    """An ablation that merges the two adapters of each client more often than runs could."""

    def rows(self, seed: Seed) -> Iterator[Row]:
        for client in seed.clients():
            for row in self.measure(client):
                yield {"client": client.info.id, **row}

    @abstractmethod
    def measure(self, client: Client) -> Iterator[Row]:
        """Rows of one client."""
