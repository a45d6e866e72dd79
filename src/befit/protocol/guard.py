"""Every reply is checked before it reaches a method: only what was declared, in shape, finite and of sane size.

The size is that of the *update*, and it is judged when all replies of a round are there, against what is usual among
them: nothing that one client says or grows can move that by much. Updates that are too long are refused, or shortened,
and a rule can keep those from steering that are neither (`befit.merge.robust`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from befit.adapters.keys import slot_of
from befit.adapters.state import norm, weighted_mean
from befit.core.errors import NotEnoughReplies, NotFinite, PayloadMismatch, TrainingDiverged
from befit.core.values import Payload, State, TensorSpec, Update, dtype_name
from befit.merge import robust
from befit.protocol.settings import GuardSettings
from befit.protocol.spool import LazyPayload

_WEIGHTS = 0.02  # root mean square at which transformers start their weights
MAJORITY = 3  # fewest updates among which one cannot set what is usual
_FEW = 100.0  # times the initial adapters: the limit for fewer updates than that, and for the rest of a reply
_STILL = 1e-3  # times the initial adapters: shorter updates count as this long, where hardly anything moves
_REST = ""  # stands for the arrays of a reply that are no update, such as a loss or a gradient

Sizes = dict[str, float]  # norm of an update, slot by slot: slots hold quantities of different kinds
Reasons = dict[str, str]  # why a reply is refused, by client


@dataclass(frozen=True)
class Replies:
    """The good replies of a round, sorted by client id, and what is known of them.

    starts    gives what a client's update started from: the arrays that it was sent, and the initial ones of those that
              it trains, in whatever stage, and was not sent. All other arrays of a reply are no update
    sizes     of each update, by client, see `sizes_of`
    initial   norm of the initial adapters, by backbone
    usual     median sizes of the round by backbone, see `of`
    """

    updates: Sequence[Update]
    starts: Callable[[Update], State]
    sizes: Mapping[str, Sizes]
    initial: Mapping[str, float]
    usual: Mapping[str, Sizes]

    @classmethod
    def of(
        cls,
        updates: Sequence[Update],
        starts: Callable[[Update], State],
        sizes: Mapping[str, Sizes],
        initial: Mapping[str, float],
    ) -> Replies:
        """All replies of a round that are well formed. What is usual among them does not change when some are refused;
        nothing is where there are too few."""
        usual: dict[str, Sizes] = {}
        for backbone, family in _families(updates).items():
            reply_sizes = [sizes[update.client.id] for update in family]
            usual[backbone] = {
                slot: max(
                    _STILL * initial[backbone], statistics.median(size[slot] for size in reply_sizes if slot in size)
                )
                for slot in sorted(set().union(*reply_sizes))
                if len(family) >= MAJORITY
            }
        return cls(updates, starts, sizes, initial, usual)

    def judged(self, guard: GuardSettings) -> tuple[Replies, Reasons]:
        """The replies of sane size, and the reasons against all others."""
        reasons: Reasons = {}
        for update in self.updates:
            client, backbone = update.client.id, update.client.backbone
            initial, usual = self.initial[backbone], self.usual[backbone]
            for slot, size in self.sizes[client].items():
                if slot == _REST:
                    limit, what = max(guard.max_norm_ratio, _FEW) * max(initial, usual.get(slot, 0.0)), "the rest"
                elif usual:
                    limit, what = guard.max_norm_ratio * usual[slot], f"the update of slot {slot}"
                else:
                    limit, what = max(guard.max_norm_ratio, _FEW) * initial, f"the update of slot {slot}"
                if not size <= limit:
                    reasons[client] = (
                        f"client {client}: {what} has norm {size:.3g}, and {limit:.3g} is the most that this round "
                        "allows (guard.max_norm_ratio)"
                    )
        return replace(self, updates=[update for update in self.updates if update.client.id not in reasons]), reasons

    def trusted(self, guard: GuardSettings) -> list[Update]:
        """The updates as they go to the method: clipped, and what the rule makes of them.

        Raises NotEnoughReplies where a rule has too few of one backbone.
        """
        replies = (
            self if guard.clip is None else replace(self, updates=[self._clipped(u, guard.clip) for u in self.updates])
        )
        if guard.rule == "none":
            return list(replies.updates)
        trusted: list[Update] = []
        for family in _families(replies.updates).values():
            if len(family) < (least := robust.least_replies(guard.attackers)):
                raise NotEnoughReplies(
                    f"{len(family)} good replies of one backbone are too few for the rule {guard.rule}: with "
                    f"guard.attackers {guard.attackers} it needs {least}"
                )
            trusted += replies._ruled(family, guard)
        return sorted(trusted, key=lambda update: update.client.id)

    def _clipped(self, update: Update, clip: float) -> Update:
        sizes, usual = self.sizes[update.client.id], self.usual[update.client.backbone]
        ratios = {slot: clip * usual[slot] / sizes[slot] for slot in sizes.keys() & usual.keys() if sizes[slot]}
        if min((ratio for slot, ratio in ratios.items() if slot != _REST), default=1.0) >= 1:
            return update
        arrays = partial(_shortened, update, self.starts, ratios)
        return replace(update, payload=LazyPayload(arrays, update.payload.scalars))

    def _ruled(self, family: Sequence[Update], guard: GuardSettings) -> list[Update]:
        """What a rule makes of the updates of one backbone."""
        common = set[str].intersection(*(set(self.starts(update)) for update in family))
        if not common:  # nothing of the replies is an update, so nothing can be compared
            return list(family)
        reads = [partial(self._read, update, common) for update in family]
        if guard.rule in ("krum", "multi-krum"):
            order = robust.most_central(robust.squared_distances(reads), guard.attackers)
            kept = order[: 1 if guard.rule == "krum" else len(family) - guard.attackers]
            return [family[index] for index in kept]
        if guard.rule == "geometric-median":
            weights = robust.geometric_weights(robust.squared_distances(reads))
            centre = weighted_mean((robust.change(*read()) for read in reads), weights)
        else:
            changes = [robust.change(*read()) for read in reads]
            trimmed = partial(robust.trimmed_mean, attackers=guard.attackers)
            rule = robust.median if guard.rule == "median" else trimmed
            centre = {key: rule([change[key] for change in changes]) for key in changes[0]}
        return [
            replace(update, payload=LazyPayload(partial(_moved, update, self.starts, centre), update.payload.scalars))
            for update in family
        ]

    def _read(self, update: Update, keys: Collection[str]) -> tuple[State, State]:
        """A reply and what it started from, in the arrays that are updates at all clients."""
        return update.payload.arrays, {key: value for key, value in self.starts(update).items() if key in keys}


def _families(updates: Sequence[Update]) -> dict[str, list[Update]]:
    """Updates by backbone: those of different width cannot be compared."""
    families: dict[str, list[Update]] = {}
    for update in updates:
        families.setdefault(update.client.backbone, []).append(update)
    return families


def sizes_of(reply: State, start: State) -> Sizes:
    """The norm of an update in each slot, and that of the rest of the reply under no name."""
    numbers = {key: array for key, array in reply.items() if array.is_floating_point()}
    moved = [key for key in numbers if key in start]
    rest = [array for key, array in numbers.items() if key not in start]
    changes = torch._foreach_sub([numbers[key] for key in moved], [start[key] for key in moved]) if moved else ()
    sizes = torch._foreach_norm([*changes, *rest]) if numbers else ()
    squares: Sizes = {}
    for slot, size in zip((*map(slot_of, moved), *[_REST] * len(rest)), map(float, sizes), strict=True):
        squares[slot] = squares.get(slot, 0.0) + size * size
    return {slot: math.sqrt(square) for slot, square in squares.items()}


def _moved(update: Update, starts: Callable[[Update], State], by: State) -> State:
    """The client's start moved by a change; what is no update as it came."""
    return {**update.payload.arrays, **{key: value + by[key] for key, value in starts(update).items() if key in by}}


def _shortened(update: Update, starts: Callable[[Update], State], ratios: Sizes) -> State:
    """The reply with the update of each slot times its ratio, where that is below one."""
    reply, start = update.payload.arrays, starts(update)
    near = {key: value for key, value in start.items() if ratios.get(slot_of(key), 1.0) < 1}
    return {**reply, **{key: torch.lerp(value, reply[key], ratios[slot_of(key)]) for key, value in near.items()}}


def reference_norm(initial: State) -> float:
    """Norm of initial adapters. Differences of whole models all start at zero, and are measured by what weights of so
    many entries have."""
    return norm(initial) or _WEIGHTS * math.sqrt(sum(array.numel() for array in initial.values()))


def check_declared(client: str, payload: Payload, declared: Mapping[str, TensorSpec], numbers: Collection[str]) -> None:
    """Raise PayloadMismatch unless a reply is exactly what was declared: names, shapes, dtypes, all of it finite, and
    beside the arrays single numbers alone."""
    check_form(client, payload, declared, numbers)
    check_finite(f"client {client} sent", payload)


def measured(
    client: str, payload: Payload, declared: Mapping[str, TensorSpec], numbers: Collection[str], start: State
) -> Sizes:
    """`check_declared`, and the size of the update: what is not finite shows in it, so that everything is gone through
    once.

    start  what the update started from, see `sizes_of`
    """
    check_form(client, payload, declared, numbers)
    sizes = sizes_of(payload.arrays, start)
    finite = all(map(math.isfinite, sizes.values()))
    check_finite(f"client {client} sent", Payload({}, payload.scalars) if finite else payload)
    return sizes


def check_form(client: str, payload: Payload, declared: Mapping[str, TensorSpec], numbers: Collection[str]) -> None:
    """`check_declared`, whatever the values of the arrays."""
    arrays = payload.arrays
    if missing := declared.keys() - arrays.keys():
        raise PayloadMismatch(f"client {client} left out {len(missing)} declared arrays, first {min(missing)!r}")
    if extra := arrays.keys() - declared.keys():
        raise PayloadMismatch(f"client {client} sent {len(extra)} undeclared arrays, first {min(extra)!r}")
    if different := payload.scalars.keys() ^ set(numbers):
        raise PayloadMismatch(
            f"client {client}: the plain number {min(different)!r} was sent and not declared, or declared and not sent"
        )
    check_numbers(f"client {client} sent", payload.scalars)
    for key, spec in declared.items():
        tensor = arrays[key]
        if tensor.shape != spec.shape:
            raise PayloadMismatch(
                f"client {client} sent {key} with shape {tuple(tensor.shape)}; declared is {spec.shape}"
            )
        if dtype_name(tensor.dtype) != spec.dtype:
            raise PayloadMismatch(f"client {client} sent {key} as {tensor.dtype}; declared is {spec.dtype}")


def check_numbers(what: str, numbers: Mapping[str, Any]) -> None:
    """Raise PayloadMismatch that names the first value which is no single number of at most 64 bits: a text, a list and
    an integer without end could carry anything."""
    for name, value in numbers.items():
        if not isinstance(value, int | float) or (isinstance(value, int) and value.bit_length() > 63):
            kind = "an integer of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
            raise PayloadMismatch(f"{what} {name!r} as {kind}, and not as one number; what is more goes into an array")


def check_finite(what: str, payload: Payload) -> None:
    """Raise NotFinite that names the first array or number that is not finite."""
    if first := _not_finite(payload):
        raise NotFinite(f"{what} {first}; if training diverged, try a smaller train.lr")


def check_memory(when: str, server: Payload) -> None:
    """Raise TrainingDiverged where the server's memory is not finite: its clients would train on from it, or deploy it,
    and a model of such numbers has a score like any other."""
    if first := _not_finite(server):
        raise TrainingDiverged(
            f"the server's memory {when} holds {first}; try a smaller train.lr, or a smaller step of the server's "
            "where its method has one"
        )


def _not_finite(payload: Payload) -> str:
    """What in a payload is not finite, the first of it; empty where everything is."""
    numbers = [array for array in payload.arrays.values() if array.is_floating_point()]
    sizes = torch._foreach_norm(numbers) if numbers else ()
    if not all(map(math.isfinite, map(float, sizes))):  # also where the squares of finite numbers overflow
        for key, tensor in payload.arrays.items():
            if not torch.isfinite(tensor).all():
                return f"numbers that are not finite (first in {key})"
    for name, value in payload.scalars.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in values if isinstance(number, float)):
            return f"a number that is not finite ({name})"
    return ""
