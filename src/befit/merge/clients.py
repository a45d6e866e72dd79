"""Clients' states as the modules that a merge goes over, and what it may know beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.adapters.state import check_same
from befit.core.errors import PayloadMismatch
from befit.core.seeds import derive_seed
from befit.core.values import ClientWeights, State, Update
from befit.merge.rules import ClientTensors
from befit.merge.spaces import ModuleUpdates


@dataclass(frozen=True)
class MergeContext:
    """What a merge may know beside the updates.

    start   the arrays that the round started from, under the keys that come back: for `delta_reference`, and for the
            A that is kept where the merged update is zero
    seed    of the run, and `round` the round: for DARE and for the rows that fill a rank up
    scales  what a client's `B A` is multiplied by, by client id; 1 where a client is missing
    scale   the same for the merged adapter
    """

    start: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    seed: int = 0
    round: int = 0
    scales: Mapping[str, float] = field(default_factory=dict[str, float])
    scale: float = 1.0

    def generator(self, *names: str) -> torch.Generator:
        """A generator that depends on seed, round and names, never on the order of anything."""
        return torch.Generator().manual_seed(derive_seed(self.seed, self.round, *names))


def counts_of(updates: Sequence[Update], weights: ClientWeights) -> list[int]:
    """How much each client counts in a mean. Raises PayloadMismatch for a negative number of examples, and where there
    is none at all."""
    counts = [update.client.num_examples if weights == "examples" else 1 for update in updates]
    if not (sum(counts) > 0 and all(count >= 0 for count in counts)):
        raise PayloadMismatch(f"weights must be non-negative with a positive sum, got {counts}")
    return counts


def finite_states(updates: Sequence[Update]) -> Iterator[State]:
    """The arrays of one update after the other. Raises PayloadMismatch at numbers that are not finite."""
    for update in updates:
        state = update.payload.arrays
        for key, value in state.items():
            if not bool(value.isfinite().all()):
                raise PayloadMismatch(
                    f"client {update.client.id}: {key} holds numbers that are not finite; leave its update out"
                )
        yield state


def is_factor(key: str) -> bool:
    return split(key)[2] in ("A", "B")


def to_scale(state: State, ratio: float) -> State:
    """The same adapter where its product counts `ratio` times as much: B alone is multiplied."""
    if ratio == 1:
        return state
    return {key: ratio * value if split(key)[2] == "B" else value for key, value in state.items()}


def entries_of(
    states: Sequence[State], clients: Sequence[str], context: MergeContext, changes: bool
) -> Callable[[], Iterator[ClientTensors]]:
    """A pass over all factors of all states, sorted by key; each entry's context is what to add again, or None.

    changes  entries are the differences from the start of the round
    B is brought to the scale of the merged adapter. Raises PayloadMismatch for keys or shapes that differ.
    """
    ratios = [context.scales.get(client, 1.0) / context.scale for client in clients]
    factors = [to_scale({k: v for k, v in s.items() if is_factor(k)}, r) for s, r in zip(states, ratios, strict=True)]
    for state, client in zip(factors, clients, strict=True):
        check_same(factors[0], state, f"the updates of clients {clients[0]} and {client}")
    if changes:
        check_same(
            factors[0],
            {k: v for k, v in context.start.items() if k in factors[0]},
            "an update and the start of its round",
        )
    dtype = _common_type(factors)

    def pass_over() -> Iterator[ClientTensors]:
        for key in sorted(factors[0]):
            parts = [state[key].to(dtype) for state in factors]
            start = context.start[key].to(dtype) if changes else None
            yield ClientTensors(key, parts if start is None else [part - start for part in parts], start)

    return pass_over


def modules_of(
    states: Sequence[State], clients: Sequence[str], context: MergeContext
) -> Callable[[], Iterator[ModuleUpdates]]:
    """A pass over the modules of all states, sorted by name, in float32 or better. Raises PayloadMismatch."""
    names = sorted({key.rpartition("/")[0] for key in states[0] if is_factor(key)})
    for state, client in zip(states, clients, strict=True):
        if missing := {key for key in states[0] if is_factor(key)} ^ {key for key in state if is_factor(key)}:
            raise PayloadMismatch(
                f"client {client}: {min(missing)!r} is in its update or in that of client {clients[0]}, but not in both"
            )
        for name in names:
            if missing := {f"{name}/A", f"{name}/B"} - state.keys():
                raise PayloadMismatch(
                    f"client {client}: {min(missing)!r} is missing. This merge needs both factors: "
                    "share both, or merge in the space factors"
                )
            _check_shapes(states[0], state, name, client)
    scales = [context.scales.get(client, 1.0) for client in clients]
    dtype = _common_type(states)

    def pass_over() -> Iterator[ModuleUpdates]:
        for name in names:
            pairs = [(state[f"{name}/B"].to(dtype), state[f"{name}/A"].to(dtype)) for state in states]
            yield ModuleUpdates(name, pairs, scales)

    return pass_over


def _common_type(states: Sequence[State]) -> torch.dtype:
    """One type for everything, so that magnitudes of all tensors compare: float32, or float64 if one has it."""
    wide = any(value.dtype == torch.float64 for state in states for value in state.values())
    return torch.float64 if wide else torch.float32


def _check_shapes(first: State, state: State, name: str, client: str) -> None:
    """Widths must agree with the first client's; ranks may differ from client to client, but not within one."""
    A, B = state[f"{name}/A"], state[f"{name}/B"]
    width, height = first[f"{name}/A"].shape[-1], first[f"{name}/B"].shape[0]
    if A.ndim != 2 or B.ndim != 2 or len(A) != B.shape[1] or A.shape[1] != width or len(B) != height:
        raise PayloadMismatch(
            f"client {client}: {name} has A {tuple(A.shape)} and B {tuple(B.shape)}, which do not "
            f"fit each other or a module of {width} inputs and {height} outputs"
        )
