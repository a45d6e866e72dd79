"""What an ablation is, and the ablations by name.

An ablation is a frozen dataclass whose fields are its options. Each module of this package registers those it defines;
the modules are imported when a name is first asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from befit.core.errors import ConfigError
from befit.core.registry import Documented, Registry
from befit.core.schema import check_values, plain
from befit.report.ablation_figures import Figure
from befit.report.table import Table

if TYPE_CHECKING:
    from befit.studies.ablations.seed import Client, Seed

Factory = TypeVar("Factory", bound=type)

Row = dict[str, Any]  # plain values: numbers, text, true, false, null


@dataclass(frozen=True)
class Findings:
    """The result of an ablation: a few sentences, the most important first, and tables and figures."""

    sentences: Sequence[str]
    tables: Sequence[Table] = field(default_factory=tuple)
    figures: Sequence[Figure] = field(default_factory=tuple)


def evenly(total: int) -> tuple[int, ...]:
    """At most ten rounds at equal distances, the last one included.

    >>> evenly(60), evenly(3)
    ((6, 12, 18, 24, 30, 36, 42, 48, 54, 60), (1, 2, 3))
    """
    return tuple(sorted({-(-total * place // 10) for place in range(1, 11)}))


def check_rounds(rounds: Sequence[int] | None) -> None:
    """Raise ValueError unless there are some, from 1 on; None stands for a default."""
    if rounds is not None and (not rounds or min(rounds) < 1):
        raise ValueError(f"rounds: must be whole numbers from 1 on, got {list(rounds)}")


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
        """The result of all rows. `metric` is the name of the score; higher is better."""


class MergingAblation(Ablation):
    """An ablation that merges the two adapters of each client more often than runs could."""

    def rows(self, seed: Seed) -> Iterator[Row]:
        for client in seed.clients():
            for row in self.measure(client):
                yield {"client": client.info.id, **row}

    @abstractmethod
    def measure(self, client: Client) -> Iterator[Row]:
        """Rows of one client."""


@dataclass(frozen=True)
class AblationEntry(Documented):
    """A registered ablation: its method, and what makes it."""

    name: str
    title: str
    method: str
    factory: Callable[..., Ablation]


_ABLATIONS: Registry[AblationEntry] = Registry("ablation", ("befit.studies.ablations",))


def register(name: str, *, title: str, method: str) -> Callable[[Factory], Factory]:
    """Enter a class under `name`. Raises ValueError where another one has that name."""

    def enter(factory: Factory) -> Factory:
        _ABLATIONS.enter(name, factory, AblationEntry(name, title, method, factory))
        return factory

    return enter


def names() -> list[str]:
    """Names of all ablations, sorted."""
    return _ABLATIONS.names()


def get(name: str) -> AblationEntry:
    """The entry of one ablation. Raises ConfigError with a suggestion."""
    return _ABLATIONS.find(name, where="the command")


def build(name: str, options: Mapping[str, Any] | None = None) -> tuple[Ablation, dict[str, Any]]:
    """The ablation with these options, and all its options in plain form. Raises ConfigError with every problem."""
    entry = get(name)
    chosen = dict(options or {})
    values, problems = check_values(entry.parameters, chosen, "ablation.", name)
    if not problems:
        try:
            ablation = entry.factory(**values)
        except ValueError as error:
            problems = [f"ablation.{error}"]
        else:
            defaults = {parameter.name: plain(parameter.default) for parameter in entry.parameters}
            return ablation, {**defaults, **plain(chosen)}
    raise ConfigError(problems, "the ablation")
