"""Which slots an adapted model has, with which factors, ranks and initial values.

Factors of one module in one slot: `A` (rank x d_in) and `B` (d_out x rank) of a low-rank update; `weight` and `bias`
of a dense update, of the task head or of a dense slot, kept as a difference from the backbone's so that slots add up
and interpolate alike; `G` (slots x d_in) of a gate; `H` (references x hidden) of what inputs are compared with. Other
forms and gates bring arrays of their own: see `befit.adapters.forms` and `befit.adapters.gates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from befit.adapters.forms import LORA, Form, ModuleShape
from befit.adapters.gates import SOFTMAX, Gate
from befit.adapters.keys import is_named, join, split
from befit.adapters.whole_model import WHOLE, Whole
from befit.core.errors import did_you_mean
from befit.core.values import State, TensorSpec

GATE = "gate"
REFERENCES = "instance/references/H"


@dataclass(frozen=True)
class ModelShapes:
    """What a layout needs to know of a backbone: target modules and task head, by canonical name, and its width.

    heads  linear modules of the task head, where it is trained; those that are targets too are no slot's dense update
           that adapts them
    last  outputs and inputs of the last block's output projection, in the smallest backbone of the federation
    linears  how many linear modules the backbone has, with or without an adapter
    parameters  shape of every weight, by the path of its module and its name, for slots of the whole model
    outputs  classes that it chooses from at a time: those of a classifier, or a vocabulary
    generates  whether it answers token by token
    mixes_rows  why the rows that an adapted layer sees are not those of the batch; empty where they are
    """

    targets: Mapping[str, ModuleShape]
    heads: Mapping[str, ModuleShape] = field(default_factory=dict)
    hidden: int = 0
    last: tuple[int, int] = (0, 0)
    linears: int = 0
    parameters: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    outputs: int = 0
    generates: bool = False
    mixes_rows: str = ""


_WIDE, _DEEP = 4096, 64  # of a model that has room for any adapter


class Extra(Protocol):
    """Arrays that go with a model without taking part in its forward pass, such as statistics that a client sends."""

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]: ...


@dataclass(frozen=True)
class Numbers:
    """So many numbers under one key, such as what a client says of itself."""

    key: str
    count: int = 1

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        return {self.key: TensorSpec((self.count,))}


@runtime_checkable
class InitialisedExtra(Protocol):
    """An extra whose arrays do not start at zero."""

    def initial(self, key: str, shape: tuple[int, ...], seed: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Slot:
    """One adapter. `delta = alpha / rank * B A`; `head` adds the task head.

    `form` is how it is parametrised: see `befit.adapters.forms`. `targets` are words for some of the model's target
    modules, as in adapter.targets; None for all of them, none for the head alone.
    """

    name: str
    rank: int
    alpha: float
    head: bool = True
    form: Form = LORA
    targets: tuple[str, ...] | None = None

    def adapted(self, shapes: ModelShapes) -> Mapping[str, ModuleShape]:
        """The modules that get low-rank arrays."""
        if self.targets is None:
            return shapes.targets
        words = self.targets
        return {name: shape for name, shape in shapes.targets.items() if any(is_named(name, word) for word in words)}

    def dense(self, shapes: ModelShapes) -> Mapping[str, ModuleShape]:
        """The modules of the task head that get a dense update."""
        adapted = self.adapted(shapes)
        return {name: shape for name, shape in shapes.heads.items() if self.head and name not in adapted}

    @property
    def scale(self) -> float:
        return self.form.scale(self.alpha / self.rank)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(
                f"slot {self.name}: rank must be at least 1 and alpha positive, "
                f"got rank {self.rank} and alpha {self.alpha}"
            )


@dataclass(frozen=True)
class Layout:
    """All slots of a method.

    gated       the slots that a gate weighs, in the order of the gate's rows
    references  how many examples, as hidden states, every input is compared with; see `befit.adapters.instance`
    gate        how the gate weighs; see `befit.adapters.gates`
    extras      arrays beside the slots, zero at the start unless they say otherwise
    """

    slots: tuple[Slot, ...]
    gated: tuple[str, ...] = ()
    references: int = 0
    gate: Gate = SOFTMAX
    extras: tuple[Extra, ...] = ()

    def slot(self, name: str) -> Slot:
        """The slot of that name. Raises ValueError with a suggestion."""
        known = {slot.name: slot for slot in self.slots}
        if name not in known:
            raise ValueError(f"no slot {name!r}; there are {', '.join(known) or 'none'}.{did_you_mean(name, known)}")
        return known[name]

    def unknown_targets(self, shapes: ModelShapes) -> list[str]:
        """Words of slots that name none of the target modules."""
        words = dict.fromkeys(word for slot in self.slots for word in slot.targets or ())
        return [word for word in words if not any(is_named(name, word) for name in shapes.targets)]

    def some_keys(self) -> list[str]:
        """Keys of every kind that this layout has, as on a model with one module of each kind and a head."""
        words = dict.fromkeys(word for slot in self.slots for word in slot.targets or ()) or ["q_proj"]
        wide = ModuleShape(_WIDE, _WIDE, True)
        targets = {f"block.{number:02}.{word}": wide for number in range(_DEEP) for word in words}
        parameters = {("m", "weight"): (_WIDE, _WIDE)}
        return [*self.specs(ModelShapes(targets, {"head": wide}, _WIDE, (_WIDE, _WIDE), parameters=parameters))]

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        """Shape of every array this layout puts on a model, in the order of the buffers: by slot, then by factor."""
        specs: dict[str, TensorSpec] = {}
        for slot in self.slots:
            for factor, modules in slot.form.factors(slot.rank, slot.adapted(shapes)).items():
                for name, shape in modules.items():
                    specs[join(slot.name, name, factor)] = TensorSpec(shape)
            if isinstance(slot.form, Whole):
                specs |= {join(slot.name, *place): TensorSpec(shape) for place, shape in shapes.parameters.items()}
            for name, shape in slot.dense(shapes).items():
                specs[join(slot.name, name, "weight")] = TensorSpec((shape.d_out, shape.d_in))
                if shape.bias:
                    specs[join(slot.name, name, "bias")] = TensorSpec((shape.d_out,))
        if self.gated:
            for name, shape in {**shapes.targets, **shapes.heads}.items():
                specs[join(GATE, name, self.gate.factor)] = TensorSpec(self.gate.shape(len(self.gated), shape.d_in))
        if self.references:
            specs[REFERENCES] = TensorSpec((self.references, shapes.hidden))
        for extra in self.extras:
            specs |= extra.specs(shapes)
        return specs

    def initial(self, shapes: ModelShapes, seed: int) -> State:
        """Initial values, of which a fresh adapter changes nothing: as the forms and the gate say, else zero.

        They depend on seed, module and shape but not on the slot: two slots of one rank start from one adapter.
        """
        slots = {slot.name: slot for slot in self.slots}
        values = {
            key: self._initial(key, spec.shape, seed, slots.get(split(key)[0]), shapes)
            for key, spec in self.specs(shapes).items()
        }
        for extra in self.extras:
            if isinstance(extra, InitialisedExtra):
                values |= {key: extra.initial(key, spec.shape, seed) for key, spec in extra.specs(shapes).items()}
        return values

    def _initial(
        self, key: str, shape: tuple[int, ...], seed: int, slot: Slot | None, shapes: ModelShapes
    ) -> torch.Tensor:
        name, module, factor = split(key)
        if name == GATE:
            return self.gate.initial(module, shape, seed)
        form, adapted = (LORA, shapes.targets) if slot is None else (slot.form, slot.adapted(shapes))
        return form.initial(module, factor, shape, seed) if module in adapted else torch.zeros(shape)


def initial_values(specs: Mapping[str, TensorSpec], seed: int) -> State:
    """Where low-rank adapters and task heads start whose names and shapes are known."""
    return {key: LORA.initial(*split(key)[1:], spec.shape, seed) for key, spec in specs.items()}


def lora(rank: int, alpha: float, slots: tuple[str, ...] = ("shared",), gated: tuple[str, ...] = ()) -> Layout:
    """Slots of one rank and scale, each with the task head where the task has one."""
    return Layout(tuple(Slot(name, rank, alpha) for name in slots), gated)


def whole(*slots: str) -> Layout:
    """Slots that change every weight of the backbone, the task head among them."""
    return Layout(tuple(Slot(name, 1, 1.0, head=False, form=WHOLE) for name in slots))
