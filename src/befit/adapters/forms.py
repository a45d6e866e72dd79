"""The forms that a slot can take: which arrays each target module gets, where they start, and how they act.

A form is a frozen value that knows nothing of a model. A new parametrisation is a new form and its branch, in a file
of its own; the layout, the model and the engines need no line for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from befit.adapters.layer import Branch, DenseBranch, LoraBranch
from befit.core.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """Width of one linear module; `bias` says whether it has one."""

    d_in: int
    d_out: int
    bias: bool = False


class Form(Protocol):
    """How one slot's adapter is parametrised on the target modules.

    basis  another slot whose arrays of the same module the branch uses too, so that several slots hold them once; ""
           for none
    """

    basis: ClassVar[str]

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shape of every array, by factor and then by module: buffers lie in this order."""
        ...

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """Where an array starts: a function of its own name and shape and of the run's seed, never of the slot."""
        ...

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        """What a layer computes with this module's arrays, by factor."""
        ...

    def scale(self, scale: float) -> float:
        """The multiplier of the branch's output, from the slot's `alpha / rank`."""
        ...

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`B` (d_out x r) and `A` (r x d_in) whose product, times the scale, is this module's update."""
        ...

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        """(d_out,), what the branch adds whatever its input, before the scale; None where that is nothing."""
        ...


@dataclass(frozen=True)
class Lora:
    """`B A` (Hu et al. 2021): `A` Kaiming-uniform, `B` zero, so that a fresh adapter changes nothing."""

    basis: ClassVar[str] = ""

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {
            "A": {name: (rank, shape.d_in) for name, shape in targets.items()},
            "B": {name: (shape.d_out, rank) for name, shape in targets.items()},
        }

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return kaiming_uniform(module, factor, shape, seed) if factor == "A" else torch.zeros(shape)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return LoraBranch(arrays["A"], arrays["B"], scale)

    def scale(self, scale: float) -> float:
        return scale

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return arrays["B"], arrays["A"]

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Dense:
    """A module's whole update as one matrix; for what a merge leaves and no low-rank form can hold. Its scale is 1."""

    basis: ClassVar[str] = ""

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {"weight": {name: (shape.d_out, shape.d_in) for name, shape in targets.items()}}

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.zeros(shape)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return DenseBranch(arrays["weight"], arrays.get("bias"))

    def scale(self, scale: float) -> float:
        return 1.0

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Full rank, with the identity as the smaller factor."""
        weight = arrays["weight"]
        d_out, d_in = weight.shape
        return (torch.eye(d_out), weight) if d_out < d_in else (weight, torch.eye(d_in))

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return arrays.get("bias")


LORA, DENSE = Lora(), Dense()


def kaiming_uniform(module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """U(-1/sqrt(d_in), 1/sqrt(d_in)): as torch and PEFT start a linear layer and `A`.

    Depends on seed, module, factor and shape but not on the slot: two slots of one rank start from one adapter.
    """
    bound = 1 / math.sqrt(shape[-1])
    generator = torch.Generator().manual_seed(derive_seed(seed, "initial", module, factor))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
