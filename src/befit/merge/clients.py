"""Clients' states as the modules that a merge goes over, and what it may know beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.errors import PayloadMismatch
from befit.merge.spaces import ModuleUpdates
from befit.seeds import derive_seed
from befit.types import State

__all__ = ["MergeContext", "is_factor", "modules_of"]


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


def is_factor(key: str) -> bool:
    return split(key)[2] in ("A", "B")


def modules_of(
    states: Sequence[State], clients: Sequence[str], context: MergeContext, changes: bool
) -> Callable[[], Iterator[ModuleUpdates]]:
    """A pass over the modules of all states, sorted by name, in float32 or better. Raises PayloadMismatch."""
    names = sorted({key.rpartition("/")[0] for key in states[0] if is_factor(key)})
    for state, client in zip(states, clients, strict=True):
        if missing := {key for key in states[0] if is_factor(key)} ^ {key for key in state if is_factor(key)}:
            raise PayloadMismatch(f"client {client}: {min(missing)!r} is in its update or in that of client "
                                  f"{clients[0]}, but not in both")  # fmt: skip
        for name in names:
            for side in ("A", "B"):
                if f"{name}/{side}" not in state:
                    raise PayloadMismatch(f"client {client}: {name} comes without its {side}; this merge needs both "
                                          "factors, so share both or use rule mean in the space factors")  # fmt: skip
            _check_shapes(states[0], state, name, client)
    scales = [context.scales.get(client, 1.0) for client in clients]

    def pass_over() -> Iterator[ModuleUpdates]:
        for name in names:
            start = None
            if changes:
                start = _pair(context.start, name, "the start of the round")
            yield ModuleUpdates(name, [_pair(state, name, "an update") for state in states], scales, start)

    return pass_over


def _pair(state: Mapping[str, Tensor], name: str, what: str) -> tuple[Tensor, Tensor]:
    if missing := {f"{name}/A", f"{name}/B"} - state.keys():
        raise PayloadMismatch(f"{what} has no {min(missing)!r}, which this merge needs")
    B, A = state[f"{name}/B"], state[f"{name}/A"]
    dtype = torch.promote_types(torch.promote_types(A.dtype, B.dtype), torch.float32)
    return B.to(dtype), A.to(dtype)


def _check_shapes(first: State, state: State, name: str, client: str) -> None:
    """Widths must agree with the first client's; ranks may differ from client to client, but not within one."""
    A, B = state[f"{name}/A"], state[f"{name}/B"]
    width, height = first[f"{name}/A"].shape[-1], first[f"{name}/B"].shape[0]
    if A.ndim != 2 or B.ndim != 2 or len(A) != B.shape[1] or A.shape[1] != width or len(B) != height:
        raise PayloadMismatch(f"client {client}: {name} has A {tuple(A.shape)} and B {tuple(B.shape)}, which do not "
                              f"fit each other or a module of {width} inputs and {height} outputs")  # fmt: skip
