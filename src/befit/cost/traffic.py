"""What travels in each stage of a method, from shapes: the one formula for estimates before a run.

`befit check`, `befit cost` and the tests that hold a run's ledger to it all come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from befit.core.values import TensorSpec
from befit.protocol.federate import resolved_stages
from befit.protocol.method import Method
from befit.protocol.stage import Stage


@dataclass(frozen=True)
class StageTraffic:
    """Bytes of every array that one client sends (`up`) and receives (`down`) in one round of a stage."""

    name: str
    rounds: int
    federated: bool
    up: Mapping[str, int]
    down: Mapping[str, int]


def stage_traffic(
    method: Method,
    specs: Mapping[str, TensorSpec],
    rounds: int,
    width: int,
    most: int | None = None,
    hidden: Callable[[Stage], int] | None = None,
) -> tuple[StageTraffic, ...]:
    """The stages of a method, each with the bytes that it declares.

    specs   all arrays of the installed layout
    rounds  of stages that do not say their own
    width   bytes of a floating-point entry on the wire; others keep their own
    most    rounds of any stage, in a limited run
    hidden  bytes of an entry that a stage sends up, where it does in a secure sum

    A first round may send less, where there is nothing to send yet; plain numbers beside the arrays are not counted.
    """
    return tuple(
        StageTraffic(
            stage.name,
            stage.rounds or 0,
            stage.federated,
            _sizes(stage.reply.specs(specs), hidden(stage) if hidden and stage.federated else width),
            _sizes(stage.down.specs(specs), width),
        )
        for stage in resolved_stages(method, rounds, most)
    )


def totals(stages: tuple[StageTraffic, ...], counted: Callable[[str], bool] = lambda key: True) -> dict[str, int]:
    """Bytes for one client in a federated round, and over all stages, of the keys that are `counted`.

    With a cohort, a client takes part in some rounds only; these are the totals of one that takes part in all.
    """
    sums: dict[str, int] = {}
    for way in ("up", "down"):
        each = [sum(size for key, size in getattr(stage, way).items() if counted(key)) for stage in stages]
        sums[f"bytes_{way}_per_round"] = sum(size for size, stage in zip(each, stages, strict=True) if stage.federated)
        sums[f"bytes_{way}_total"] = sum(size * stage.rounds for size, stage in zip(each, stages, strict=True))
    return sums


def communication(
    method: Method,
    specs: Mapping[str, TensorSpec],
    rounds: int,
    width: int,
    most: int | None = None,
    hidden: Callable[[Stage], int] | None = None,
) -> dict[str, int]:
    """`totals` of all arrays; the arguments are those of `stage_traffic`."""
    return totals(stage_traffic(method, specs, rounds, width, most, hidden))


def _sizes(declared: Mapping[str, TensorSpec], width: int) -> dict[str, int]:
    dtypes: dict[str, torch.dtype] = {key: getattr(torch, spec.dtype) for key, spec in declared.items()}
    widths = {key: width if dtype.is_floating_point else dtype.itemsize for key, dtype in dtypes.items()}
    return {key: prod(spec.shape) * widths[key] for key, spec in declared.items()}
