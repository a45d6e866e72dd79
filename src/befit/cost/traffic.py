"""What travels in each stage of a method, from shapes: the one formula for estimates before a run.

`befit check`, `befit cost` and the tests that hold a run's ledger to it all come here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from befit.core.values import TensorSpec
from befit.core.wire import spec_bytes
from befit.core.wire_form import Wire
from befit.protocol.method import Method
from befit.protocol.schedule import resolved_stages
from befit.protocol.stage import Stage


@dataclass(frozen=True)
class StageTraffic:
    """Bytes of every array that one client sends (`up`) and receives (`down`) in one round of a stage.

    up_rounds  in how many rounds an array goes up, where that is not in all of them
    """

    name: str
    rounds: int
    federated: bool
    up: Mapping[str, int]
    down: Mapping[str, int]
    up_rounds: Mapping[str, int] = field(default_factory=dict[str, int])

    def total(self, way: Literal["up", "down"], counted: Callable[[str], bool] = lambda key: True) -> int:
        """Over all rounds, of the keys that are `counted`."""
        sizes, rounds = (self.up, self.up_rounds) if way == "up" else (self.down, {})
        return sum(size * rounds.get(key, self.rounds) for key, size in sizes.items() if counted(key))

    def per_round(self, way: Literal["up", "down"], counted: Callable[[str], bool] = lambda key: True) -> int:
        """The mean over the rounds, rounded down."""
        return self.total(way, counted) // max(1, self.rounds)


def stage_traffic(
    method: Method,
    specs: Mapping[str, TensorSpec],
    rounds: int,
    wire: Wire,
    most: int | None = None,
    replies: int = 1,
    hidden: Callable[[Stage], int] | None = None,
) -> tuple[StageTraffic, ...]:
    """The stages of a method, each with the bytes that it declares.

    specs   all arrays of the installed layout
    rounds  of stages that do not say their own
    wire    the form in which the method's arrays travel
    most    rounds of any stage, in a limited run
    replies  how many a round has, where downloads grow with them
    hidden  bytes of an entry that a stage sends up, where it does in a secure sum

    A first round may send less, where there is nothing to send yet; plain numbers beside the arrays are not counted.
    """
    return tuple(
        StageTraffic(
            stage.name,
            stage.rounds or 0,
            stage.federated,
            _masked(stage, specs, hidden(stage)) if hidden and stage.federated else _up(stage, specs, wire),
            _sizes(stage.down.specs(specs, replies), wire.sent_down),
            _up_rounds(stage, specs),
        )
        for stage in resolved_stages(method, rounds, most)
    )


def totals(stages: tuple[StageTraffic, ...], counted: Callable[[str], bool] = lambda key: True) -> dict[str, int]:
    """Bytes for one client in a round of the last federated stage, and over all stages, of the keys that are `counted`.

    With a cohort, a client takes part in some rounds only; these are the totals of one that takes part in all.
    """
    sums: dict[str, int] = {}
    last = [stage for stage in stages if stage.federated][-1:]
    ways: tuple[Literal["up", "down"], ...] = ("up", "down")
    for way in ways:
        sums[f"bytes_{way}_per_round"] = sum(stage.per_round(way, counted) for stage in last)
        sums[f"bytes_{way}_total"] = sum(stage.total(way, counted) for stage in stages)
    return sums


def communication(
    method: Method,
    specs: Mapping[str, TensorSpec],
    rounds: int,
    wire: Wire,
    most: int | None = None,
    replies: int = 1,
    hidden: Callable[[Stage], int] | None = None,
) -> dict[str, int]:
    """`totals` of all arrays; the arguments are those of `stage_traffic`."""
    return totals(stage_traffic(method, specs, rounds, wire, most, replies, hidden))


def _up(stage: Stage, specs: Mapping[str, TensorSpec], wire: Wire) -> dict[str, int]:
    return _sizes(stage.reply.specs(specs), wire.sent_up)


def _masked(stage: Stage, specs: Mapping[str, TensorSpec], width: int) -> dict[str, int]:
    return {key: prod(spec.shape) * width for key, spec in stage.reply.specs(specs).items()}


def _up_rounds(stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Of a stage with turns, in how many rounds each array goes up."""
    if not stage.turns:
        return {}
    cycles, rest = divmod(stage.rounds or 0, len(stage.turns))
    counts = Counter[str]()
    for turn in range(len(stage.turns)):
        counts.update(dict.fromkeys(stage.reply_in(turn + 1).specs(specs), cycles + (turn < rest)))
    return dict(counts)


def _sizes(
    declared: Mapping[str, TensorSpec], sent: Callable[[str, TensorSpec], Mapping[str, TensorSpec]]
) -> dict[str, int]:
    return {key: sum(map(spec_bytes, sent(key, spec).values())) for key, spec in declared.items()}
