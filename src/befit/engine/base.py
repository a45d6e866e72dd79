"""What an engine is: the pipe between the server's kernel and the clients'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from befit.types import ClientInfo, Failure, Payload, Score, Tick, Update

__all__ = ["Engine", "Memories"]


class Memories(Protocol):
    """Clients' memories as a checkpoint sees them; see `befit.engine.store.ClientStore` for what each does."""

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
