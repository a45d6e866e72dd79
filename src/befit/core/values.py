"""The values that flow between server and clients: states, payloads, updates and ticks.

A *state* is a flat mapping from keys `slot/module/factor` to CPU tensors, for example
`shared/block.03.q_proj/A`. Nothing here knows a method, a model or a transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from befit.core.seeds import derive_seed

Scalar = int | float | str | bool | list[int] | list[float] | list[str]
State = dict[str, Tensor]

__all__ = ["ClientInfo", "Cost", "Failure", "Payload", "Scalar", "Score", "State", "TensorSpec", "Tick", "Update"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one declared tensor, without its values. `dtype` is a torch name such as "float32"."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Payload:
    """What travels, and also what is kept: named arrays and plain numbers, in the intersection of all transports."""

    arrays: State = field(default_factory=dict[str, Tensor])
    scalars: dict[str, Scalar] = field(default_factory=dict[str, Scalar])


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
    """What one exchange with one client took; bytes as encoded for the wire, arrays and numbers together."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    peak_memory_mib: float = 0.0


@dataclass(frozen=True, slots=True)
class Update:
    """One client's reply: what it sends for the method, a report of numbers for the log, and what it cost."""

    client: ClientInfo
    payload: Payload
    report: dict[str, float] = field(default_factory=dict[str, float])
    cost: Cost = field(default_factory=lambda: Cost())


@dataclass(frozen=True, slots=True)
class Failure:
    """A reply that did not come, or was refused: which client, where, what kind, and why."""

    client: str
    stage: str
    round: int
    kind: str
    reason: str
    traceback: str = ""
    cost: Cost = field(default_factory=lambda: Cost())


@dataclass(frozen=True, slots=True)
class Score:
    """What one client measured with its own model: metrics over `examples` examples of one split."""

    client: str
    split: str
    examples: int
    metrics: Mapping[str, float]
    cost: Cost = field(default_factory=lambda: Cost())
