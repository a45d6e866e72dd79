"""Per-sample gradients of backbones that recompute activations: exact, or a clear refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from befit.adapters.keys import EVERYTHING
from befit.core.errors import ModelError
from befit.core.values import State
from befit.models.backbone import checkpoint_activations
from befit.protocol.site import Site
from befit.tasks.base import Batch
from befit.train.persample import sample_gradients
from tests.tiny import assert_same, make_site, random_state

BLOCKS = {"vit": "ViTLayer", "bert": "BertLayer", "llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}


def ready(kind: str, targets: str = "all", **options: Any) -> tuple[Site, Batch]:
    site = make_site(kind, targets=targets, **options)
    site.model.load(random_state(site.model))
    return site, site.examples("train").batch(range(6))


def recompute_always(site: Site, kind: str, reentrant: bool) -> None:
    """Checkpoint every block in whatever mode, as code that does not look at `training` would."""
    blocks = [module for module in site.model.backbone.modules() if type(module).__name__ == BLOCKS[kind]]
    assert len(blocks) == 2
    for block in blocks:
        block.forward = partial(recomputed, block.forward, reentrant)


def recomputed(forward: Any, reentrant: bool, *inputs: Any, **options: Any) -> Any:
    return checkpoint(partial(forward, **options), *inputs, use_reentrant=reentrant)


def plain(kind: str, targets: str = "all") -> State:
    site, batch = ready(kind, targets)
    return sample_gradients(site, batch, "shared")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_checkpointing_of_transformers_changes_nothing(kind: str, training: bool, reentrant: bool) -> None:
    """It belongs to training mode, which the statistics switch off; the model's dropout goes with it."""
    site, batch = ready(kind, dropout=0.5, adapter_dropout=0.5)
    backbone: Any = site.model.backbone
    backbone.activation_checkpointing_enable({"use_reentrant": reentrant})
    backbone.train(training)
    assert_same(sample_gradients(site, batch, "shared"), plain(kind))
    assert backbone.training == training and backbone.is_activation_checkpointing


def test_the_option_of_the_configuration_recomputes_in_training_and_not_in_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted at the first adapted layer: two runs for a step of training, one for the statistics."""
    site, batch = ready("bert")
    checkpoint_activations(site.model.backbone, "tiny")
    runs: list[bool] = []
    site.model.layers["block.00.q_proj"].register_forward_hook(lambda layer, *_: runs.append(layer.training))
    with site.model.training(True), site.model.active("shared"), site.model.trainable(EVERYTHING):
        site.loss(batch).backward()
    assert runs == [True, True]
    runs.clear()
    assert_same(sample_gradients(site, batch, "shared"), plain("bert"))
    assert runs == [False]


@pytest.mark.parametrize("targets", ["auto", "all"])
def test_a_model_that_always_recomputes_is_handled_exactly(kind: str, targets: str) -> None:
    """The hook sits on the output of the first run; the one of the second run is not part of any backward pass."""
    site, batch = ready(kind, targets)
    recompute_always(site, kind, reentrant=False)
    assert_same(sample_gradients(site, batch, "shared"), plain(kind, targets))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_a_model_that_runs_adapted_modules_without_gradients_is_refused(kind: str, targets: str) -> None:
    """Re-entrant recomputation of frozen blocks: only a head would be left, and the blocks' statistics missing."""
    site, batch = ready(kind, targets)
    recompute_always(site, kind, reentrant=True)
    lost = len(site.model.shapes.targets)
    with pytest.raises(ModelError, match=rf"no gradient reaches {lost} adapted modules, first 'block\.00.*re-entrant"):
        sample_gradients(site, batch, "shared")
    assert not any(layer._forward_hooks for layer in site.model.layers.values())


def test_reentrant_recomputation_with_inputs_that_want_gradients_is_exact(kind: str) -> None:
    """Then the second run is the one that is differentiated, and its hooks are called once."""
    site, batch = ready(kind)
    recompute_always(site, kind, reentrant=True)
    embedding: Any = site.model.backbone.get_input_embeddings()  # type: ignore[operator]

    def want(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output.requires_grad_(True)

    embedding.register_forward_hook(want)
    assert_same(sample_gradients(site, batch, "shared"), plain(kind))


def test_statistics_inside_no_grad_are_refused() -> None:
    site, batch = ready("llama")
    with torch.no_grad(), pytest.raises(ModelError, match=r"no gradient reaches 14 adapted modules"):
        sample_gradients(site, batch, "shared")
