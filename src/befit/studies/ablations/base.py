"""What an ablation is: what it measures at a client, and what all measurements together say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from befit.report.ablation_figures import Figure
from befit.report.table import Table

if TYPE_CHECKING:
    from befit.studies.ablations.pairs import Client

__all__ = ["Ablation", "Findings", "Row", "evenly"]

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

    def options(self) -> Mapping[str, Any]:
        """Options of the method that it varies, each at one value, to find out early whether they go together."""
        return {}

    def checkpoints(self, total: int) -> Sequence[int]:
        """Which of `total` federated rounds to keep: ten, so that one ablation can use what another trained."""
        return evenly(total)

    @abstractmethod
    def measure(self, client: Client) -> Iterator[Row]:
        """Rows of plain values; seed and client are added."""

    @abstractmethod
    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        """What all rows say. `metric` is the name of what `Pair.score` measures; higher is better."""
