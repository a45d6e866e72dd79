"""Which slots an adapted model has, with which factors, ranks and initial values.

Factors of one module in one slot: `A` (rank x d_in) and `B` (d_out x rank) of a low-rank update; `weight` and `bias`
of a dense update, of the task head or of a dense slot, kept as a difference from the backbone's so that slots add up
and interpolate alike; `G` (slots x d_in) of a gate; `H` (references x hidden) of what inputs are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from befit.adapters.keys import join
from befit.seeds import derive_seed
from befit.types import State, TensorSpec

__all__ = ["GATE", "REFERENCES", "Layout", "ModelShapes", "ModuleShape", "Slot", "initial_values", "lora"]

GATE = "gate"
REFERENCES = "instance/references/H"


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """Width of one linear module; `bias` says whether it has one."""

    d_in: int
    d_out: int
    bias: bool = False


@dataclass(frozen=True)
class ModelShapes:
    """What a layout needs to know of a backbone: target modules and task head, by canonical name, and its width."""

    targets: Mapping[str, ModuleShape]
    heads: Mapping[str, ModuleShape] = field(default_factory=dict)
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """One adapter. `delta = alpha / rank * B A` (alpha / sqrt(rank) with `rslora`); `head` adds the task head.

    `dense` holds each module's whole update instead, `weight` (d_out x d_in), with scale 1; for what a merge leaves
    and no low-rank form can hold.
    """

    name: str
    rank: int
    alpha: float
    head: bool = True
    rslora: bool = False
    dense: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"slot {self.name}: rank must be at least 1 and alpha positive, "
                             f"got rank {self.rank} and alpha {self.alpha}")  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """All slots of a method.

    gated       the slots that a gate weighs, in the order of the gate's rows
    references  how many examples, as hidden states, every input is compared with; see `befit.adapters.instance`
    """

    slots: tuple[Slot, ...]
    gated: tuple[str, ...] = ()
    references: int = 0

    def slot(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        """Shape of every array this layout puts on a model, in the order of the buffers: by slot, then by factor."""
        specs: dict[str, TensorSpec] = {}
        for slot in self.slots:
            for name, shape in shapes.targets.items() if slot.dense else ():
                specs[join(slot.name, name, "weight")] = TensorSpec((shape.d_out, shape.d_in))
            for name, shape in shapes.targets.items() if not slot.dense else ():
                specs[join(slot.name, name, "A")] = TensorSpec((slot.rank, shape.d_in))
            for name, shape in shapes.targets.items() if not slot.dense else ():
                specs[join(slot.name, name, "B")] = TensorSpec((shape.d_out, slot.rank))
            for name, shape in shapes.heads.items() if slot.head else ():
                specs[join(slot.name, name, "weight")] = TensorSpec((shape.d_out, shape.d_in))
                if shape.bias:
                    specs[join(slot.name, name, "bias")] = TensorSpec((shape.d_out,))
        if self.gated:
            for name, shape in {**shapes.targets, **shapes.heads}.items():
                specs[join(GATE, name, "G")] = TensorSpec((len(self.gated), shape.d_in))
        if self.references:
            specs[REFERENCES] = TensorSpec((self.references, shapes.hidden))
        return specs

    def initial(self, shapes: ModelShapes, seed: int) -> State:
        """Initial values: `A` and `G` Kaiming-uniform, all else zero, so that a fresh adapter changes nothing.

        `A` depends on seed, module and shape but not on the slot: two slots of one rank start from one adapter.
        """
        return initial_values(self.specs(shapes), seed)


def initial_values(specs: Mapping[str, TensorSpec], seed: int) -> State:
    """As `Layout.initial`, for arrays whose names and shapes are known."""
    state: State = {}
    for key, spec in specs.items():
        _, name, factor = key.split("/")
        if factor in ("A", "G"):
            state[key] = _kaiming_uniform(spec.shape, derive_seed(seed, "initial", name, factor))
        else:
            state[key] = torch.zeros(spec.shape)
    return state


def _kaiming_uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    """U(-1/sqrt(d_in), 1/sqrt(d_in)): as torch and PEFT start a linear layer and `A`."""
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def lora(
    rank: int, alpha: float, slots: tuple[str, ...] = ("shared",), gated: tuple[str, ...] = (), rslora: bool = False
) -> Layout:
    """Slots of one rank and scale, each with the task head where the task has one."""
    return Layout(tuple(Slot(name, rank, alpha, rslora=rslora) for name in slots), gated)
