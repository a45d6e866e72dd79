"""What an engine is: the pipe between the server's kernel and the clients'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from befit.core.values import ClientInfo, Failure, Payload, Score, Tick, Update


@dataclass(frozen=True)
class Checkpoint:
    """How far a run is (`stage` rounds complete up to `round`), and the server's memory there.

    clip  longest update that counts in full from here on, where the server hides who took part
    """

    stage: int
    round: int
    server: Payload
    clip: float | None = None


class Memories(Protocol):
    """Clients' memories as a checkpoint sees them; see `befit.protocol.store.ClientStore` for what each does."""

    @property
    def serial(self) -> int: ...

    def commit(self) -> dict[str, str]: ...

    def settle(self) -> None: ...

    def restore(self, files: Mapping[str, str], serial: int) -> None: ...


class Engine(Protocol):
    """Delivers requests to clients and yields what comes back, in any order.

    span  how many rounds of a personal stage travel as one message
    """

    span: int

    def clients(self) -> Sequence[ClientInfo]: ...

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]: ...

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]: ...
