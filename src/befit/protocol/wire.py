"""Which arrays of a method are compressed on the wire: what is declared of a stage says it, and no method does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from befit.adapters.keys import EVERYTHING
from befit.core.values import TensorSpec
from befit.core.wire_form import Wire
from befit.protocol.settings import WireSettings
from befit.protocol.stage import Stage

if TYPE_CHECKING:
    from befit.protocol.method import Method


def wire_of(method: Method, settings: WireSettings, layouts: Iterable[Mapping[str, TensorSpec]]) -> Wire:
    """How a method's arrays travel.

    layouts  all arrays of the installed layout, of every backbone
    """
    int8 = settings.dtype == "int8"
    dtype = torch.float32 if int8 else getattr(torch, settings.dtype)
    if not settings.compresses:
        return Wire(dtype)
    keys = {key for layout in layouts for stage in method.plan() for key in compressed(stage, layout)}
    return Wire(dtype, int8, settings.top_k, frozenset(keys))


def compressed(stage: Stage, layout: Mapping[str, TensorSpec]) -> set[str]:
    """The arrays of a stage of which clients send an update: they are trained in it, and declared alike for both ways.

    All others are no change of something that both ends have, such as counts, statistics of the data, gradients,
    predictions and adapters that only go one way.
    """
    up, down = stage.reply.specs(layout), stage.down.plain.specs(layout)
    trains = EVERYTHING if stage.trains is None else stage.trains
    return {
        key
        for key, spec in up.items()
        if down.get(key) == spec == layout.get(key) and trains(key) and spec.dtype == "float32" and prod(spec.shape)
    }
