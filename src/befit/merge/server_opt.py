"""Server optimisers: the step that the server takes from its adapter towards the merged one.

`D = merged - theta` is what plain averaging would add (Reddi et al. 2021, Algorithm 2; Hsu et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from befit.adapters.keys import to_slot
from befit.core.errors import ConfigError
from befit.core.values import State

PRIVATE = "server:"  # slots of this prefix stay at the server
_FIRST, _SECOND = f"{PRIVATE}momentum", f"{PRIVATE}second"


class AfterMerge(Protocol):
    """What the server does with what a merge made, as a value."""

    def step(self, server: State, merged: State) -> State:
        """The server's arrays of the next round, from those before and those that the merge made."""
        ...


@dataclass(frozen=True)
class ServerOptimiser:
    """`theta + lr * m / (sqrt(u) + tau)`, or `theta + lr * v` with momentum alone.

    kind     "avgm" (Hsu et al. 2019): `v = beta1 v + D`; "nesterov": the same v, and a step by `D + beta1 v`;
             "adagrad": `u += D^2`; "adam": `u = beta2 u + (1 - beta2) D^2`; "yogi":
             `u -= (1 - beta2) D^2 sign(u - D^2)`; the last two with `m = beta1 m + (1 - beta1) D` (Reddi et al. 2021,
             algorithm 2)
    variant  "reference" as in a common code base: avgm with `v = beta1 v + (1 - beta1) D` and `v = D` in the first
             round; adam and yogi with `m` in place of `D` in u, and `m = D` in the first round

    u starts at tau^2, all else at zero; nothing is corrected for that start.
    """

    kind: Literal["avgm", "nesterov", "adagrad", "adam", "yogi"]
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    variant: Literal["paper", "reference"] = "paper"

    def __post_init__(self) -> None:
        first = "momentum" if self.kind in ("avgm", "nesterov") else "beta1"  # as methods call it
        shares, sizes = {first: self.beta1, "beta2": self.beta2}, {"server_lr": self.lr, "tau": self.tau}
        problems = [f"{k}: must be at least 0 and below 1, got {v}" for k, v in shares.items() if not 0 <= v < 1]
        problems += [f"{name}: must be positive, got {value}" for name, value in sizes.items() if not value > 0]
        if problems:
            raise ConfigError(problems, f"the server optimiser {self.kind}")

    def step(self, server: State, merged: State) -> State:
        """The server's arrays of the next round: `theta` under its keys, its own averages under private slots.

        server  the arrays before; merged  what the merge made, the same keys without the private ones
        """
        after: State = {}
        for key, target in merged.items():
            theta = server[key].to(torch.float32)
            change = target.to(torch.float32) - theta
            moved, averages = self._moved(change, server.get(to_slot(key, _FIRST)), server.get(to_slot(key, _SECOND)))
            after[key] = (theta + self.lr * moved).to(target.dtype)
            after |= {to_slot(key, slot): value for slot, value in averages.items()}
        return after

    def _moved(self, D: Tensor, m: Tensor | None, u: Tensor | None) -> tuple[Tensor, State]:
        reference, first = self.variant == "reference", m is None
        m = torch.zeros_like(D) if m is None else m
        u = torch.full_like(D, self.tau**2) if u is None else u
        if self.kind in ("avgm", "nesterov"):
            v = self.beta1 * m + (1 - self.beta1 if reference and not first else 1) * D
            return v if self.kind == "avgm" else D + self.beta1 * v, {_FIRST: v}
        if self.kind == "adagrad":
            u = u + D.square()
            return D / (u.sqrt() + self.tau), {_SECOND: u}
        m = D if reference and first else self.beta1 * m + (1 - self.beta1) * D
        square = (m if reference else D).square()
        if self.kind == "adam":
            u = self.beta2 * u + (1 - self.beta2) * square
        else:
            u = u - (1 - self.beta2) * square * torch.sign(u - square)
        return m / (u.sqrt() + self.tau), {_FIRST: m, _SECOND: u}
