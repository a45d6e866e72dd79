"""What adapters multiply in: float32, or the backbone's own dtype, with float32 arrays to train and to send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layer import SlotLinear, add_up
from befit.adapters.model import AdaptedModel
from befit.core.values import State, Tick
from befit.methods.parts.recipe import Recipe
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.train.loop import train
from befit.train.passes import Pass
from befit.train.persample import sample_gradients
from tests.tiny import assert_near, assert_same, make_site, random_state, tiny_model

AT = Tick("federate", 2, 2, 0)
SHARED = Pass(slot("shared"), ("shared",))


def site_of(kind: str, native: bool, dtype: torch.dtype = torch.bfloat16, layout: Any = None) -> Site:
    model = AdaptedModel(tiny_model(kind).to(dtype), head=kind in ("vit", "bert"), native=native)
    site = make_site(kind, layout, model=model)
    site.model.load(random_state(site.model, size=0.1))
    return site


def trained(site: Site, *passes: Pass) -> State:
    train(site, passes, AT)
    return site.model.dump(EVERYTHING)


def distance(first: State, second: State) -> float:
    return float(torch.stack([(first[key] - second[key]).square().sum() for key in first]).sum().sqrt())


def test_a_float32_backbone_trains_to_the_same_bits(kind: str) -> None:
    first, second = (trained(site_of(kind, native, torch.float32), SHARED) for native in (False, True))
    assert_same(first, second)


def test_in_bfloat16_inputs_are_not_copied_and_arrays_stay_in_float32(kind: str) -> None:
    seen: set[torch.dtype] = set()

    def spy(layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        seen.add(x.dtype)
        return add_up(layer, x, dropped, y)

    site = site_of(kind, True)
    batch = next(iter(site.batches("train", 1, AT)))
    with site.model.active("shared"), site.model.trainable(slot("shared")):
        site.model._router.mixer = spy
        site.loss(batch).backward()
    assert seen == {torch.bfloat16}
    leaves = site.model.leaves(EVERYTHING).values()
    assert {leaf.dtype for leaf in leaves} == {leaf.grad.dtype for leaf in leaves if leaf.grad is not None}
    assert {array.dtype for array in site.model.dump(EVERYTHING).values()} == {torch.float32}
    # A step is smaller than what bfloat16 could add to a value, and is not lost.
    before = site.model.dump(EVERYTHING)
    with torch.no_grad():
        for parameter in site.model.parameters(slot("shared")):
            parameter += 1e-5
    assert distance(site.model.dump(EVERYTHING), before) > 0


def test_it_trains_as_in_float32_but_for_rounding(kind: str) -> None:
    start = site_of(kind, False).model.dump(EVERYTHING)
    exact, rounded = (trained(site_of(kind, native), SHARED) for native in (False, True))
    assert 0 < distance(exact, rounded) < 0.5 * distance(exact, start)


@pytest.mark.parametrize("name", ["ditto", "fedalt", "feddpa", "fedsim", "guidance"])
def test_gates_mixers_and_terms_run_in_it(name: str) -> None:
    method = build_method(name)
    assert isinstance(method, Recipe)
    site = site_of("llama", True, layout=method.layout)
    before = site.model.dump(EVERYTHING)
    after = trained(site, *method.passes)
    assert distance(before, after) > 0 and all(array.isfinite().all() for array in after.values())


@pytest.mark.parametrize(
    "block",
    [
        "rela",
        {"name": "rela", "gate": "noisy-input"},
        {"name": "fedmosaic", "blocks": 1, "rank": 4},
        {"name": "fedmosaic", "blocks": 2, "rank": 4},
        "bayestune",
    ],
    ids=str,
)
def test_slots_of_other_forms_run_in_it(block: Any) -> None:
    method: Any = build_method(block)
    site = site_of("llama", True, layout=method.layout)
    slots = [one.name for one in method.layout.slots if one.name != "basis"]
    mixer = "gate" if method.layout.gated else "sum"
    before = site.model.dump(EVERYTHING)
    after = trained(site, Pass(slot(*slots), method.layout.gated or tuple(slots), mixer=mixer))
    assert distance(before, after) > 0 and all(array.isfinite().all() for array in after.values())


def test_gradients_of_single_samples_sum_to_the_batch_s() -> None:
    site = site_of("llama", True)
    batch = site.examples("train").batch(range(4))
    found = {key: value.sum(0) for key, value in sample_gradients(site, batch, "shared", reduction="sum").items()}
    with site.model.active("shared"), site.model.trainable(slot("shared")):
        logits = site.logits(batch)
        site.model.zero_gradients()
        site.task.sample_losses(logits, batch, "sum").sum().backward()
    expected = {key: leaf.grad.clone() for key, leaf in site.model.leaves(slot("shared")).items()}  # type: ignore[union-attr]
    scale = max(float(value.abs().max()) for value in expected.values())
    assert_near({key: found[key] for key in expected}, expected, rtol=0.1, atol=0.05 * scale)
