"""What one backward pass for all samples leaves alone and what it refuses; its values are in test_persample_oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import lora
from befit.core.errors import ModelError
from befit.models.backbone import checkpoint_activations
from befit.tasks.base import Batch
from befit.train.persample import sample_gradients
from tests.tiny import assert_near, assert_same, make_site, random_state

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def ready(kind: str, **options: Any) -> tuple[Any, dict[str, Tensor], Batch]:
    site = make_site(kind, **options)
    state = random_state(site.model)
    site.model.load(state)
    return site, state, site.examples("train").batch(range(6))


def test_their_mean_is_the_gradient_of_the_batch_for_classifiers_and_of_sequence_means_for_language_models(
    kind: str,
) -> None:
    site, _, batch = ready(kind)
    found = sample_gradients(site, batch, "shared")
    with site.model.active("shared"), site.model.trainable(EVERYTHING):
        site.task.sample_losses(site.logits(batch), batch, "mean").mean().backward()
        expected = {key: leaf.grad for key, leaf in site.model.leaves(EVERYTHING).items()}
    assert_near({key: value.mean(0) for key, value in found.items()}, expected, rtol=1e-3, atol=1e-5)  # type: ignore
    if kind in ("vit", "bert"):
        site.model.zero_gradients()
        with site.model.active("shared"), site.model.trainable(EVERYTHING):
            site.loss(batch).backward()
        assert_near({key: value.mean(0) for key, value in found.items()}, expected, rtol=1e-3, atol=1e-5)  # type: ignore


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_padding_length_does_not_matter(kind: str) -> None:
    site, _, batch = ready(kind)
    wider = {
        name: torch.nn.functional.pad(tensor, (0, 5), value=-100 if name == "labels" else 0)
        if tensor.dim() == 2
        else tensor
        for name, tensor in batch.items()
    }
    assert wider["input_ids"].shape[1] == batch["input_ids"].shape[1] + 5
    assert_near(sample_gradients(site, wider, "shared"), sample_gradients(site, batch, "shared"), rtol=1e-3, atol=2e-5)


def test_only_the_slot_asked_for_is_active_and_nothing_is_left_behind() -> None:
    site, state, batch = ready("bert", layout=lora(2, 6.0, slots=("shared", "personal")))
    alone = make_site("bert")
    alone.model.load({key: tensor for key, tensor in state.items() if key.startswith("shared/")})
    with site.model.active("personal"):
        found = sample_gradients(site, batch, "shared")
    assert_same(found, sample_gradients(alone, batch, "shared"))
    assert all(not bool(leaf.grad.any()) for leaf in site.model.leaves(EVERYTHING).values() if leaf.grad is not None)
    assert_same(site.model.dump(EVERYTHING), state)
    with site.model.active("shared"), site.model.trainable(slot("shared")):
        site.loss(batch).backward()
    assert len(found["shared/block.00.q_proj/A"]) == 6  # no hook of before listens any more


@pytest.mark.parametrize("training", [False, True])
def test_dropout_and_recomputation_are_off_whatever_mode_the_model_is_in(training: bool) -> None:
    """A recomputed activation would fire the hook twice; dropout would tear the pairs of two models apart."""
    plain, _, batch = ready("bert")
    expected = sample_gradients(plain, batch, "shared")
    site, _, _ = ready("bert", dropout=0.5, adapter_dropout=0.5)
    checkpoint_activations(site.model.backbone, "tiny")
    if training:
        site.model.backbone.train()
    assert_near(sample_gradients(site, batch, "shared"), expected)
    assert site.model.backbone.training == training


def test_a_model_that_folds_samples_into_another_axis_is_refused() -> None:
    site, _, batch = ready("vit")
    layer = site.model.layers["block.00.q_proj"]
    folded = layer.forward
    layer.forward = lambda x: folded(x.flatten(0, 1)).view(*x.shape[:2], -1)
    with pytest.raises(ModelError, match=r"block\.00\.q_proj sees an input of shape \(30, 16\) for 6 rows"):
        sample_gradients(site, batch, "shared")
