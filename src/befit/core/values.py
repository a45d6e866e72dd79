"""The values that flow between server and clients: states, payloads, updates and ticks.

A *state* is a flat mapping from keys `slot/module/factor` to CPU tensors, for example
`shared/block.03.q_proj/A`. Nothing here knows a method, a model or a transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar
from urllib.parse import unquote

import torch
from torch import Tensor

from befit.core.plugins import reason_of
from befit.core.seeds import derive_seed
from befit.core.text import readable

Item = TypeVar("Item")
IGNORED = -100  # the label of a token that is not learnt, as losses of torch and transformers have it
Scalar = int | float | str | bool | list[int] | list[float] | list[str]
State = dict[str, Tensor]
ClientWeights = Literal["examples", "uniform"]  # in a mean: by number of training examples, or all the same


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one declared tensor, without its values. `dtype` is a torch name such as "float32"."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Payload:
    """What travels, and also what is kept: named arrays and plain numbers, in the intersection of all transports."""

    arrays: State = field(default_factory=dict[str, Tensor])
    scalars: dict[str, Scalar] = field(default_factory=dict[str, Scalar])

    def number(self, name: str, default: float | None = None) -> float:
        """A plain number, `default` where there is none of this name. Raises KeyError without a default."""
        value = self.scalars[name] if default is None else self.scalars.get(name, default)
        assert isinstance(value, (int, float)), f"{name} is {value!r} and no number"
        return value

    def part(self, *path: str) -> Payload:
        """The payload that `with_part` put under a name; that within it, for further names. Empty without one.

        >>> Payload({}, {"round": 3}).with_part("base", Payload({}, {"round": 1})).part("base")
        Payload(arrays={}, scalars={'round': 1})
        """
        mark = "".join(map(_mark, path))
        return self._map(lambda key: key.removeprefix(mark) if key.startswith(mark) else None)

    @classmethod
    def of_parts(cls, parts: Mapping[str, Payload]) -> Payload:
        """A payload with these parts, by their names, and nothing else."""
        marked = [(_mark(name), part) for name, part in parts.items()]
        return cls(
            {mark + key: value for mark, part in marked for key, value in part.arrays.items()},
            {mark + key: value for mark, part in marked for key, value in part.scalars.items()},
        )

    def with_part(self, name: str, part: Payload) -> Payload:
        """This payload with another one inside it, in place of what had the name."""
        mark, rest = _mark(name), self._map(lambda key: None if key.startswith(_mark(name)) else key)
        return rest | part._map(lambda key: mark + key)

    def take_part(self, name: str) -> Payload:
        """The part of this name, out of this payload: the one thing that changes a payload.

        For a memory that was handed over, with arrays that are too large to be there twice.
        """
        part, mark = self.part(name), _mark(name)
        for entries in (self.arrays, self.scalars):
            for key in [key for key in entries if key.startswith(mark)]:
                del entries[key]
        return part

    def __or__(self, other: Payload) -> Payload:
        """Both payloads as one; of arrays and numbers that both have, those of the other."""
        return Payload({**self.arrays, **other.arrays}, {**self.scalars, **other.scalars})

    def parts(self) -> dict[str, Payload]:
        """All parts by name: of those with arrays first, in the order of the arrays."""
        parts: dict[str, Payload] = {}
        for key, array in self.arrays.items():
            name, end, rest = key.partition(_END)
            if end:
                parts.setdefault(unquote(name), Payload()).arrays[rest] = array
        for key, value in self.scalars.items():
            name, end, rest = key.partition(_END)
            if end:
                parts.setdefault(unquote(name), Payload()).scalars[rest] = value
        return parts

    def split(self, names: Collection[str] | None) -> tuple[Payload, Payload]:
        """What is in parts of these names, however deep they lie within other parts, and the rest; None takes all."""
        if names is None:
            return self, Payload()

        def inside(key: str) -> bool:
            *path, _ = key.split(_END)
            return any(unquote(name) in names for name in path)

        return self._map(lambda key: key if inside(key) else None), self._map(lambda key: None if inside(key) else key)

    def _map(self, name: Callable[[str], str | None]) -> Payload:
        """The entries under other names, without those that get none."""
        arrays = {new: value for key, value in self.arrays.items() if (new := name(key)) is not None}
        return Payload(arrays, {new: value for key, value in self.scalars.items() if (new := name(key)) is not None})


_END = "@"  # after the name of a part


def _mark(name: str) -> str:
    """What the names of a part's entries begin with. The name's own "@" is written otherwise, so that it ends there."""
    return name.replace("%", "%25").replace(_END, "%40") + _END


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """What a client says of itself when it joins. `num_examples` counts its training examples and is its weight."""

    id: str
    backbone: str
    num_examples: int


@dataclass(frozen=True, slots=True)
class Tick:
    """When we are: round `round` (from 1) of the `rounds` of a stage, in a run with this seed.

    `span` is the number of rounds that one message covers: more than one only where no server is needed between.
    """

    stage: str
    round: int
    rounds: int
    seed: int
    span: int = 1

    @property
    def last(self) -> int:
        return self.round + self.span - 1

    def seed_for(self, client: str, purpose: str) -> int:
        """A seed that depends on run, stage, round, client and purpose, never on the order of arrival."""
        return derive_seed(self.seed, self.stage, self.round, client, purpose)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exchange with one client took; bytes as encoded for the wire, arrays and numbers together.

    cpu_seconds  of processor time, of all threads of the process that did the work
    """

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    peak_memory_mib: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Of both, one after the other."""
        return Cost(
            self.bytes_up + other.bytes_up,
            self.bytes_down + other.bytes_down,
            self.seconds + other.seconds,
            max(self.peak_memory_mib, other.peak_memory_mib),
            self.cpu_seconds + other.cpu_seconds,
        )


class Clock:
    """Time from its making on: as clocks on walls show it, and of the process's processors."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def cost(self, up: int = 0, down: int = 0, peak_memory_mib: float = 0.0) -> Cost:
        return Cost(up, down, time.perf_counter() - self._wall, peak_memory_mib, time.process_time() - self._cpu)


class Stopwatch:
    """Adds up the time between `start` and `stop`, over and over."""

    def __init__(self) -> None:
        self._before, self._clock = Cost(), Clock()
        self.runs = True

    def start(self) -> None:
        if not self.runs:
            self._clock, self.runs = Clock(), True

    def stop(self) -> None:
        if self.runs:
            self._before, self.runs = self.cost(), False

    def cost(self) -> Cost:
        """Of all that has run so far."""
        return self._before + self._clock.cost() if self.runs else self._before

    def outside(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; it is stopped while each of them is made or waited for."""
        remaining = iter(items)
        while True:
            self.stop()
            try:
                item = next(remaining)
            except StopIteration:
                return
            finally:
                self.start()
            yield item


@dataclass(frozen=True, slots=True)
class Update:
    """One client's reply: what it sends for the method, a report of numbers for the log, and what it cost."""

    client: ClientInfo
    payload: Payload
    report: dict[str, float] = field(default_factory=dict[str, float])
    cost: Cost = field(default_factory=lambda: Cost())


REFUSED = "refused"  # the kind of a failure: a reply came, and was not used
LEFT_OUT = "left out"  # the client does not take part, and was not asked
NO_REPLY = frozenset({"late", "offline", "crashed", LEFT_OUT})  # the kinds where none came


@dataclass(frozen=True, slots=True)
class Failure:
    """A reply that did not come, or was refused: which client, where, what kind, and why.

    kind, reason  in one line each, however they came about: much of them can be a client's own words
    """

    client: str
    stage: str
    round: int
    kind: str
    reason: str
    traceback: str = ""
    cost: Cost = field(default_factory=lambda: Cost())

    @classmethod
    def of(
        cls, client: str, stage: str, round: int, error: Exception, traceback: str = "", cost: Cost | None = None
    ) -> Failure:
        """What an error says of a client's reply."""
        return cls(client, stage, round, type(error).__name__, reason_of(error), traceback, cost or Cost())

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", readable(self.kind, 100))
        object.__setattr__(self, "reason", readable(self.reason))


@dataclass(frozen=True, slots=True)
class Score:
    """What one client measured with its own model: metrics over `examples` examples of one split.

    others  the headline on each other client's examples, where all clients are on one machine; it travels nowhere
    each    the headline of every single example, in their order, at the end of a run; it travels nowhere either. Empty
            where the headline is no mean over examples
    confusion  by class and by what it was taken for, how many examples, at the end of a run; it travels nowhere either
    """

    client: str
    split: str
    examples: int
    metrics: Mapping[str, float]
    cost: Cost = field(default_factory=lambda: Cost())
    others: Mapping[str, float] = field(default_factory=dict[str, float])
    each: Sequence[float] = ()
    confusion: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
