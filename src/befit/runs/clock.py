"""Clients of this machine that answer in the order of a simulated clock, which says who is slow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, Failure, Payload, Score, Tick, Update
from befit.protocol.engine import Engine
from befit.protocol.settings import Asynchronous

Value = TypeVar("Value")


def client_time(client: str, times: float | Mapping[str, float], seed: int) -> float:
    """The time that a client takes for a round: the first pattern's that fits it, else 1; or drawn by its id and the
    seed from a log-normal of median 1, of which `times` is the sigma.

    >>> client_time("b", {"b*": 4.0}, 0), client_time("a", {"b*": 4.0}, 0), client_time("a", 0.0, 0)
    (4.0, 1.0, 1.0)
    """
    if isinstance(times, Mapping):
        return next((time for pattern, time in times.items() if fnmatchcase(client, pattern)), 1.0)
    generator = torch.Generator().manual_seed(derive_seed(seed, "time", client))
    return math.exp(times * float(torch.randn((), generator=generator, dtype=torch.float64)))


@dataclass(frozen=True)
class _Due:
    """A client at work. Sorted by when it is done, and of several at once in the order of clients."""

    time: float
    place: int
    client: str
    at: Tick
    sent: Payload


class SimulatedEngine:
    """An engine on a simulated clock. A client's training is done when its answer is due, so that nothing is computed
    whose answer nobody waits for, and as many are done at once as make a round.

    engine  delivers to clients, and answers at once
    stages  whose rounds are asynchronous; all others are as the engine does them
    known   what the clock shows: by stage `now`, when each round `began` that somebody trains from, and when each round
            was `over`. A part of a run's checkpoint
    """

    busy = frozenset[str]()
    span, terms = 1, ""

    def __init__(
        self,
        engine: Engine,
        settings: Asynchronous,
        seed: int,
        stages: Sequence[str],
        known: MutableMapping[str, Any],
    ) -> None:
        self._engine, self._settings, self._stages, self._known = engine, settings, stages, known
        self._place = {info.id: place for place, info in enumerate(engine.clients())}
        self._times = {client: client_time(client, settings.times, seed) for client in self._place}
        self._flying: list[_Due] = []

    def clients(self) -> Sequence[ClientInfo]:
        return self._engine.clients()

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        return self._engine.score(requests, at, split)

    def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return self._engine.secure(step, requests, at)

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        if at.stage not in self._stages:
            return self._engine.exchange(requests, at)
        self._flying = [flight for flight in self._flying if flight.at.stage == at.stage]
        clock = self._clock(at.stage)
        began = clock["began"].setdefault(str(at.round), clock["now"])
        for client in requests:
            due = _Due(began + self._times[client], self._place[client], client, at, requests[client])
            self._flying.append(due)
        self._flying.sort(key=lambda flight: (flight.time, flight.place))
        return self._answers(at)

    def over(self) -> dict[str, list[float]]:
        """By stage, the time at which each of its rounds was over, counted from the start of the stage."""
        return {stage: list(clock["over"]) for stage, clock in self._known.items()}

    def _clock(self, stage: str) -> dict[str, Any]:
        return self._known.setdefault(stage, {"now": 0.0, "began": {}, "over": []})

    def _answers(self, at: Tick) -> Iterator[Update | Failure]:
        """The answers as they are due: first as many as make a round, then one after the other for those that are no
        good."""
        clock, count = self._clock(at.stage), self._settings.buffer
        while self._flying:
            now, self._flying = self._flying[:count], self._flying[count:]
            clock["now"] = max(clock["now"], now[-1].time)
            clock["over"][at.round - 1 :] = [clock["now"]]
            rounds = {flight.at.round for flight in self._flying}
            clock["began"] = {round_: time for round_, time in clock["began"].items() if int(round_) in rounds}
            for then in dict.fromkeys(flight.at for flight in now):
                requests = {flight.client: flight.sent for flight in now if flight.at == then}
                yield from _one_ahead(self._engine.exchange(requests, then))
            count = 1


def _one_ahead(values: Iterator[Value]) -> Iterator[Value]:
    """The same values; the last one is given out once the iterator has ended, so that whoever takes as many as there
    are leaves nothing undone.

    >>> list(_one_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    waiting: list[Value] = []
    for value in values:
        yield from waiting
        waiting = [value]
    yield from waiting
