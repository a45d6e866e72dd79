"""One backward pass against a loop over samples and against vmap(grad), both with PEFT; and the product space."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import assert_near, assert_same, make_site, random_state
from tests.unit.adapters.peft_oracle import dense_model, parameters_of, peft_model
from torch import Tensor

from befit.adapters.keys import EVERYTHING, join, slot
from befit.adapters.layout import lora
from befit.errors import ModelError
from befit.models.backbone import checkpoint_activations
from befit.tasks.base import Batch
from befit.train.persample import sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


def one(batch: Batch, row: int) -> Batch:
    """A single sample, still padded to the width of its batch."""
    return {name: tensor[row : row + 1] for name, tensor in batch.items()}


def ready(kind: str, **options: Any) -> tuple[Any, dict[str, Tensor], Batch]:
    site = make_site(kind, **options)
    state = random_state(site.model)
    site.model.load(state)
    return site, state, site.examples("train").batch(range(6))


@REDUCTIONS
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_one_backward_pass_gives_the_gradients_of_a_loop_over_samples(kind: str, targets: str, reduction: Any) -> None:
    site, state, batch = ready(kind, targets=targets)
    found = sample_gradients(site, batch, "shared", reduction=reduction)
    oracle = peft_model(kind, site.model, state, "shared")
    parameters = parameters_of(oracle, site.model, "shared")
    rows: dict[str, list[Tensor]] = {key: [] for key in parameters}
    for row in range(6):
        oracle.zero_grad()
        sample = one(batch, row)
        site.task.sample_losses(site.task.logits(oracle, sample), sample, reduction).sum().backward()
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            rows[key].append(parameter.grad.clone())
    assert_near(found, {key: torch.stack(grads) for key, grads in rows.items()}, rtol=1e-3, atol=2e-5)


@REDUCTIONS
def test_one_backward_pass_gives_the_gradients_of_vmap(kind: str, reduction: Any) -> None:
    site, state, batch = ready(kind)
    found = sample_gradients(site, batch, "shared", reduction=reduction)
    oracle = peft_model(kind, site.model, state, "shared")
    names = {id(parameter): name for name, parameter in oracle.named_parameters()}
    trained = {names[id(p)]: p.detach() for p in parameters_of(oracle, site.model, "shared").values()}
    keys = {names[id(p)]: key for key, p in parameters_of(oracle, site.model, "shared").items()}
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if kind == "bert":  # transformers looks at the values of a flat mask, which vmap forbids, but not at a full one
        mask = batch["attention_mask"]
        inputs["attention_mask"] = ((1.0 - mask.float()) * -1e9)[:, None, None].expand(-1, 1, mask.shape[1], -1)

    def loss(values: dict[str, Tensor], inputs: Batch, labels: Tensor, weight: Tensor) -> Tensor:
        logits = torch.func.functional_call(oracle, values, kwargs={k: v[None] for k, v in inputs.items()}).logits[0]
        if labels.dim() == 0:
            return torch.nn.functional.cross_entropy(logits, labels)
        terms = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="none")
        return terms.sum() / weight

    learnt = (batch["labels"][:, 1:] != -100).sum(1) if batch["labels"].dim() > 1 else torch.ones(6)
    weights = learnt.float() if reduction == "mean" else torch.ones(6)
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(
        trained, inputs, batch["labels"], weights
    )
    assert_near(found, {keys[name]: value for name, value in gradients.items()}, rtol=1e-3, atol=2e-5)


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
    wider = {name: torch.nn.functional.pad(tensor, (0, 5), value=-100 if name == "labels" else 0)
             if tensor.dim() == 2 else tensor for name, tensor in batch.items()}  # fmt: skip
    assert wider["input_ids"].shape[1] == batch["input_ids"].shape[1] + 5
    assert_near(sample_gradients(site, wider, "shared"), sample_gradients(site, batch, "shared"), rtol=1e-3, atol=2e-5)


def test_the_product_space_gradient_is_that_of_a_dense_change_of_the_weights(kind: str) -> None:
    site, state, batch = ready(kind, targets="all")
    found = sample_gradients(site, batch, "shared", space="product")
    dense = dense_model(kind, site.model, state, "shared")
    for name in site.model.shapes.targets:
        weight = dense.get_submodule(site.model.paths[name]).weight
        assert isinstance(weight, Tensor)
        weight.requires_grad_(True)
        for row in range(6):
            weight.grad = None
            sample = one(batch, row)
            site.task.sample_losses(site.task.logits(dense, sample), sample).sum().backward()
            assert weight.grad is not None
            expected = weight.grad.T if kind == "gpt2" else weight.grad
            torch.testing.assert_close(found[join("shared", name, "delta")][row], expected, rtol=1e-3, atol=2e-5)


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
    with pytest.raises(ModelError, match=r"block\.00\.q_proj sees an input of shape \(30, 16\) for 6 samples"):
        sample_gradients(site, batch, "shared")
