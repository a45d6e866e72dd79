"""Adapters in named slots on one frozen backbone: which arrays there are, their arithmetic, and low-rank algebra."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.adapters.keys import EVERYTHING, NOTHING, Selector, block, factor, module, select, slot
    from befit.adapters.layout import Layout, ModelShapes, Slot, lora, whole
    from befit.adapters.lowrank import inner
    from befit.adapters.model import AdaptedModel
    from befit.adapters.state import add, cosine, interpolate, norm, rename, scale, weighted_mean

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "AdaptedModel",
    "Layout",
    "ModelShapes",
    "Selector",
    "Slot",
    "add",
    "block",
    "cosine",
    "factor",
    "inner",
    "interpolate",
    "lora",
    "module",
    "norm",
    "rename",
    "scale",
    "select",
    "slot",
    "weighted_mean",
    "whole",
]

__getattr__, __dir__ = lazy(__name__, __file__)
