"""Training waits for a device only when a round ends: between two steps nothing is read back from it.

The device is `meta`, whose tensors have shapes and no values: whatever would wait for a GPU fails there (numbers as
Python's, `nonzero`, masks as indices, copies to the CPU), and what only queues work runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import Layout
from befit.adapters.model import AdaptedModel
from befit.core.values import Tick
from befit.methods.parts.recipe import Recipe
from befit.protocol.registry import build_method, method_names
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.train.loop import train
from befit.train.passes import Pass
from tests.tiny import make_site, tiny_model

META = torch.device("meta")
STEPS = 2
# SGD, since the fused form of AdamW is written for real devices alone; it keeps its count of steps on the device.
BUDGET = TrainSettings(max_steps=STEPS, batch_size=4, lr=1e-2, optimiser="sgd", momentum=0.9, grad_clip=1.0)


class Waits(TorchDispatchMode):
    """Collects copies from the CPU to the device that wait for all work before them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.name())
        queued = kwargs.get("non_blocking", args[-1] is True)
        if name in ("aten::_to_copy", "aten::copy_") and not queued:
            source, target = (args[0], kwargs.get("device")) if name == "aten::_to_copy" else (args[1], args[0].device)
            if isinstance(source, Tensor) and source.device.type == "cpu" and target == META:
                self.found.append(f"{name} of {tuple(source.shape)}")
        return func(*args, **kwargs)


def on_meta(kind: str, layout: Layout | None = None, **settings: Any) -> Site:
    backbone: Any = tiny_model(kind).to(META)
    backbone.set_attn_implementation("sdpa")  # for which transformers looks whether it can do without a mask
    model = AdaptedModel(backbone, head=kind in ("vit", "bert"), dropout=0.1)
    model.device = META
    return make_site(kind, layout, model=model, budget=replace(BUDGET, **settings))


@contextmanager
def nothing_waits(steps: int, taken: list[int]) -> Iterator[None]:
    """All steps are taken before the first number is read, which are the losses of a finished round."""
    with Waits() as waits, pytest.raises((RuntimeError, NotImplementedError)) as failed:
        yield
    assert len(taken) == steps, f"after {len(taken)} steps: {failed.value}"
    assert not waits.found


def test_no_step_waits_for_the_device(kind: str) -> None:
    site, taken = on_meta(kind), list[int]()
    with nothing_waits(STEPS, taken):
        train(
            site,
            [Pass(slot("shared"), ("shared",), after=lambda step, *_: taken.append(step))],
            Tick("federate", 1, 2, 0),
        )


def passes_of(name: str) -> tuple[Pass, ...]:
    method = build_method(name)
    return method.passes if isinstance(method, Recipe) else ()


@pytest.mark.parametrize("name", [name for name in method_names() if passes_of(name)])
def test_no_step_of_a_recipe_waits_for_the_device(name: str) -> None:
    """Its terms, mixers and gates too. In the second round, in which every pass takes part."""
    method: Any = build_method({"name": name, **({"rank": 4} if name == "ravan" else {})})  # of a tiny model
    site, taken = on_meta("llama", method.layout), list[int]()
    passes = [replace(each, after=lambda step, *_: taken.append(step)) for each in method.passes]
    with nothing_waits(STEPS * len(passes), taken):
        train(site, passes, Tick("federate", 2, 2, 0), in_sequence=method.in_sequence)


@pytest.mark.parametrize("read", ["number", "places", "mask", "copy"])
def test_what_would_wait_is_noticed(read: str) -> None:
    site, taken = on_meta("llama"), list[int]()
    ways = {
        "number": lambda values: float(values.sum()),
        "places": torch.nonzero,
        "mask": lambda values: values[values > 0],
        "copy": lambda values: values.copy_(torch.zeros(values.shape)),
    }

    def look(step: int, *_: object) -> None:
        taken.append(step)
        ways[read](next(iter(site.model.leaves(EVERYTHING).values())))

    with pytest.raises(AssertionError), nothing_waits(STEPS, taken):
        train(site, [Pass(slot("shared"), ("shared",), after=look)], Tick("federate", 1, 2, 0))
