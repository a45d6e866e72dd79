"""What the kernel asks of whoever writes down its course."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from befit.core.values import Cost, Failure, Payload, Score, Tick, Update
from befit.protocol.engine import Best, Checkpoint


class Journal(Protocol):
    """Where the kernel writes what happens, and where it finds how far an interrupted run came.

    spool  a folder for replies that wait to be aggregated
    """

    @property
    def spool(self) -> Path: ...

    def resume(self) -> Checkpoint | None: ...

    def rounds_from_cache(self, stage: int, server: Payload) -> Iterator[Checkpoint]:
        """Called before a stage. Where another run has trained it already, and maybe some after it: the rounds of these
        that have to be scored, and their end. At each, all is as if this run had just got there."""
        ...

    def accepted(self, at: Tick, update: Update, step: bool = False) -> None:
        """A reply is as declared; called as replies come, in any order, while its arrays are in memory. Its size is
        judged later, with the others'.

        step  it answers a step of a secure sum, and has no update
        """
        ...

    def trained(self, at: Tick, update: Update) -> None:
        """The same replies once all have come, in the order of clients."""
        ...

    def scored(self, at: Tick, score: Score) -> None: ...

    def validated(self, at: Tick, score: Score) -> None:
        """A score by which the best round of a stage is found, and which is no result."""
        ...

    def back(self, at: Tick, best: Best) -> Payload:
        """Take up the state of the last checkpoint that was the best so far, which `best` is, at clients too; returns
        the server's memory there. `at` is that round, of all that the stage could have had."""
        ...

    def failed(self, failure: Failure, scoring: bool = False) -> None:
        """An exchange that came to nothing: of training, or of a request to score."""
        ...

    def served(self, stage: str, round_: int, cost: Cost) -> None:
        """What the server itself computed: for the downloads and the aggregation of a round, or before the first one,
        in its `OPENING`."""
        ...

    def event(self, event: dict[str, Any]) -> None: ...

    def completed(self, point: Checkpoint, force: bool) -> None:
        """A round is over; make it durable if it is time to, or if `force` says so."""
        ...
