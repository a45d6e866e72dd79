"""How many entries the slots of a layout have: the factors, the task head, and whatever else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from befit.adapters.keys import Selector, slot_of, split
from befit.core.values import TensorSpec

__all__ = ["count", "slot_sizes"]


def count(specs: Mapping[str, TensorSpec], chosen: Selector | None = None) -> int:
    """Entries of the chosen arrays, of all without a choice."""
    return sum(prod(spec.shape) for key, spec in specs.items() if chosen is None or chosen(key))


def slot_sizes(specs: Mapping[str, TensorSpec], heads: Collection[str]) -> dict[str, dict[str, int]]:
    """By slot: entries of `A`, `B`, `head`, of other factors under their own name where there are any, and `total`.

    specs  all arrays of an installed layout
    heads  names of the modules of the task head, whose weights and biases make up `head`
    """
    sizes: dict[str, dict[str, int]] = {}
    for key, spec in specs.items():
        _, module, factor = split(key)
        part = "head" if module in heads and factor in ("weight", "bias") else factor
        size = sizes.setdefault(slot_of(key), {"A": 0, "B": 0, "head": 0})
        size[part] = size.get(part, 0) + prod(spec.shape)
    return {name: {**size, "total": sum(size.values())} for name, size in sizes.items()}
