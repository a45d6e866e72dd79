"""Whose adapter counts how much in whose mixture: by relevance, all alike, or as a bargain of all.

The last two are the alternatives in FedMosaic (Seo et al. 2026, Tables 30 and 33). They need no gradients, so
none are taken or sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.schema import POSITIVE, SHARE, at_least, check_fields
from befit.core.values import State
from befit.merge.nash import nash_weights
from befit.methods.parts.mosaic.relevance import newcomer_weights, relevance, similarities
from befit.methods.parts.mosaic.sketch import Sketch

_CHUNK = 2**22  # entries of a stack whose products are summed at a time


@dataclass(frozen=True)
class ServerBank:
    """What the server has of all clients.

    stacks    by group of clients (a backbone's, or everybody), their last uploads, a row for each client, in the order
              of names; see `befit.methods.parts.mosaic.bank`
    groups    by group, the places of its members among all clients
    before    by group and a stack's name, what all of them received last, for a mixing that `compares`
    sketches  everybody's gradients, a row for each client, where gradients are taken
    """

    stacks: Mapping[str, State]
    groups: Mapping[str, Sequence[int]]
    before: Mapping[str, State]
    sketches: Tensor | None = None


class Mixing(Protocol):
    """compares  whether it looks at what clients changed, and so at what they received before"""

    compares: ClassVar[bool]

    def __call__(self, bank: ServerBank) -> dict[str, Tensor]:
        """By group: weights (M, M) float32, a row for each member, of sum 1."""
        ...

    def newcomer(self, sketches: Tensor | None, own: Tensor | None, last: Tensor) -> Tensor:
        """Weights (M,) float32 of a group's members, of sum 1, for somebody who never trained.

        sketches  the members' gradients (M, …) and `own`, the newcomer's, where gradients are taken
        last      the weights (M, M) that the members have
        """
        ...


@dataclass(frozen=True)
class Relevance:
    """By likeness of gradients (FedMosaic, eq. 4): the block `relevance` of a method.

    temperature   tau of the softmax over cosines
    similarity    cosine of whole gradients ("flat", the paper) or mean over their columns ("colmean", the code)
    include_self  the own adapter is part of the mixture, as in equation 4; the code leaves it out
    every         the frozen model's gradient is taken at every so many steps
    ema           weight of a round's mean gradient in the running one
    noise         standard deviation of the noise on gradients
    noise_at      on every "gradient" before their mean (algorithm 1), or on the running mean at every "upload" (eq. 3)
    share         share of the gradient's entries that travel
    mask          which: "random" ones, the same for all (the paper), or the first "rows" (the code)
    """

    temperature: Annotated[float, POSITIVE] = 0.5
    similarity: Literal["flat", "colmean"] = "flat"
    include_self: bool = False
    every: Annotated[int, POSITIVE] = 10
    ema: Annotated[float, SHARE] = 0.5
    noise: Annotated[float, at_least(0)] = 1e-4
    noise_at: Literal["gradient", "upload"] = "gradient"
    share: Annotated[float, SHARE] = 0.4
    mask: Literal["random", "rows"] = "random"
    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, "relevance")
        if self.similarity == "colmean" and self.mask != "rows":
            problem = "similarity: colmean compares columns, and a random mask leaves none; set mask: rows"
            raise ConfigError([problem], "relevance")

    def noise_on(self, place: Literal["gradient", "upload"]) -> float:
        """The standard deviation there: `noise`, or 0 where it is added at the other place."""
        return self.noise if self.noise_at == place else 0.0

    def __call__(self, bank: ServerBank) -> dict[str, Tensor]:
        assert bank.sketches is not None
        cosines = similarities(bank.sketches, self.similarity)
        return {
            group: relevance(cosines, self.temperature, members, self.include_self)
            for group, members in bank.groups.items()
        }

    def newcomer(self, sketches: Tensor | None, own: Tensor | None, last: Tensor) -> Tensor:
        if sketches is None or own is None:
            raise PayloadMismatch("a newcomer cannot be given a mixture by relevance: the server holds no gradients")
        return newcomer_weights(sketches, own, self.temperature, self.similarity)


@dataclass(frozen=True)
class Equal:
    """All others alike, or all with the client itself (`include_self`)."""

    include_self: bool = False
    compares: ClassVar[bool] = False

    def __call__(self, bank: ServerBank) -> dict[str, Tensor]:
        sizes = {group: len(members) for group, members in bank.groups.items()}
        return {group: relevance(torch.zeros(n, n), 1.0, range(n), self.include_self) for group, n in sizes.items()}

    def newcomer(self, sketches: Tensor | None, own: Tensor | None, last: Tensor) -> Tensor:
        return torch.full((len(last),), 1 / len(last))


@dataclass(frozen=True)
class Nash:
    """The same mixture for everybody in a group, by the Nash bargaining solution of what its members changed.

    The updates of a group are against what all received last, over all arrays that the group shares.
    """

    compares: ClassVar[bool] = True

    def __call__(self, bank: ServerBank) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for group, members in bank.groups.items():
            gram = torch.zeros(len(members), len(members), dtype=torch.float64)
            for name, stack in bank.stacks[group].items():
                gram += _products(stack, bank.before[group][name])
            weights[group] = nash_weights(gram).float().expand(len(members), -1).contiguous()
        return weights

    def newcomer(self, sketches: Tensor | None, own: Tensor | None, last: Tensor) -> Tensor:
        """What everybody has."""
        return last[0]


def _products(stack: Tensor, before: Tensor) -> Tensor:
    """`D D^T` (M, M) float64 with `D = stack - before` (M, entries)."""
    flat, base = stack.reshape(len(stack), -1), before.reshape(1, -1)
    width = max(1, _CHUNK // len(stack))
    total = torch.zeros(len(stack), len(stack), dtype=torch.float64)
    for part, common in zip(flat.split(width, 1), base.split(width, 1), strict=True):
        update = part.double() - common.double()
        total += update @ update.T
    return total


def make_mixing(name: str, settings: Relevance) -> tuple[Mixing, Sketch | None]:
    """The mixing of that name, and what has to travel for it. Raises ConfigError for settings that it does not use."""
    if name == "relevance":
        return settings, Sketch(settings.share, settings.mask)
    used = {"include_self"} if name == "equal" else set()
    unused_options = [
        f"relevance.{option.name}: mixing: {name} does not use it, got {value}"
        for option in fields(settings)
        if (value := getattr(settings, option.name)) != option.default and option.name not in used
    ]
    if unused_options:
        raise ConfigError(unused_options, "the mixing")
    return (Equal(settings.include_self) if name == "equal" else Nash()), None
