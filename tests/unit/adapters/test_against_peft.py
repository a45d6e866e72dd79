"""PEFT as oracle: the same factors give the same logits and the same gradients, on four architectures."""

from __future__ import annotations

import pytest
import torch

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import Layout, Slot, lora
from tests.tiny import assert_near, make_site, random_state
from tests.unit.adapters.peft_oracle import dense_model, parameters_of, peft_model

# PEFT asks transformers by a name that transformers 5 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TWO = Layout((Slot("shared", 2, 6.0), Slot("personal", 3, 4.0)))
TWO_WITHOUT_HEADS = Layout((Slot("shared", 2, 6.0, head=False), Slot("personal", 3, 4.0, head=False)))


@pytest.mark.parametrize("targets", ["auto", "all"])
def test_one_slot_has_the_logits_and_gradients_of_peft(kind: str, targets: str) -> None:
    site = make_site(kind, lora(2, 6.0), targets=targets)
    model, state = site.model, random_state(site.model)
    batch = site.examples("train").batch(range(5))
    oracle = peft_model(kind, model, state, "shared")
    model.load(state)
    with model.active("shared"), model.trainable(EVERYTHING):
        mine = site.logits(batch)
        site.task.loss(mine, batch).backward()
    theirs = site.task.logits(oracle, batch)
    site.task.loss(theirs, batch).backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    expected = {key: parameter.grad for key, parameter in parameters_of(oracle, model, "shared").items()}
    assert all(gradient is not None and gradient.any() for gradient in expected.values())
    found = {key: leaf.grad for key, leaf in model.leaves(EVERYTHING).items()}
    assert_near(found, expected, rtol=1e-3, atol=1e-5)  # type: ignore[arg-type]


def test_two_active_slots_are_two_active_adapters_of_peft(kind: str) -> None:
    site = make_site(kind, TWO_WITHOUT_HEADS)
    model, state = site.model, random_state(site.model)
    batch = site.examples("train").batch(range(5))
    oracle = peft_model(kind, model, state, "shared", "personal")
    model.load(state)
    with model.active("shared", "personal"), model.trainable(EVERYTHING):
        mine = site.logits(batch)
        site.task.loss(mine, batch).backward()
    theirs = site.task.logits(oracle, batch)
    site.task.loss(theirs, batch).backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    expected = {key: p.grad for key, p in parameters_of(oracle, model, "shared", "personal").items()}
    assert_near({k: v.grad for k, v in model.leaves(EVERYTHING).items()}, expected, rtol=1e-3, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [("shared",), ("personal",), ("shared", "personal"), ()])
def test_active_slots_add_up_to_a_dense_change_of_the_weights(kind: str, slots: tuple[str, ...]) -> None:
    site = make_site(kind, TWO, targets="all")
    model, state = site.model, random_state(site.model)
    batch = site.examples("train").batch(range(5))
    model.load(state)
    with model.active(*slots), torch.no_grad():
        mine = site.logits(batch)
        theirs = site.task.logits(dense_model(kind, model, state, *slots), batch)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_fresh_adapter_leaves_the_logits_as_they_were_bit_for_bit(kind: str) -> None:
    site = make_site(kind, targets="all")
    batch = site.examples("train").batch(range(5))
    with torch.no_grad():
        bare = site.logits(batch)
        with site.model.active("shared"):
            assert torch.equal(site.logits(batch), bare)


def test_a_bfloat16_backbone_keeps_its_dtype_and_trains_adapters_in_float32(kind: str) -> None:
    """bfloat16 has 8 bits: the adapters' own contribution agrees with the float32 model's to a few per cent."""
    site, exact = make_site(kind), make_site(kind)
    state = random_state(site.model)
    site.model.backbone.to(torch.bfloat16)
    batch = site.examples("train").batch(range(5))
    logits = {}
    for one in (site, exact):
        one.model.load(state)
        with one.model.active("shared"), one.model.trainable(slot("shared")):
            logits[one is site] = one.logits(batch)
            one.task.loss(logits[one is site], batch).backward()
    assert logits[True].dtype == torch.bfloat16
    mine, truth = logits[True].float(), logits[False]
    assert (mine - truth).norm() < 0.05 * truth.norm()
    for key, leaf in site.model.leaves(EVERYTHING).items():
        reference = exact.model.leaves(EVERYTHING)[key].grad
        assert leaf.dtype == torch.float32 and leaf.grad is not None and reference is not None
        assert (leaf.grad - reference).norm() < 0.2 * reference.norm(), key
