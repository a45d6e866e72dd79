"""Per-sample gradients to 1e-5: a loop over unpadded samples and vmap(grad), both in float64 with PEFT.

The error of an array is the norm of its difference over the norm of the truth, both over all samples: single entries
near zero would measure nothing but the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from befit.adapters.keys import EVERYTHING, join
from befit.adapters.layout import lora
from befit.core.values import State, Tick
from befit.protocol.site import Site
from befit.tasks.base import Batch
from befit.train.paired_fisher import Statistics, estimate
from befit.train.persample import sample_gradients
from tests.tiny import make_site, random_state
from tests.unit.adapters.peft_oracle import dense_model, parameters_of, peft_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ROWS = 6
TWO = lora(2, 6.0, slots=("shared", "personal"))
SLOTS = pytest.mark.parametrize("slot", ["shared", "personal"])
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


def ready(kind: str, targets: str = "auto") -> tuple[Site, State, Batch]:
    site = make_site(kind, TWO, targets=targets)
    state = random_state(site.model)
    site.model.load(state)
    return site, state, site.examples("train").batch(range(ROWS))


def double(batch: Batch) -> Batch:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def unpadded(batch: Batch, row: int) -> Batch:
    """One sample at its own length."""
    length = int(batch["attention_mask"][row].sum()) if "attention_mask" in batch else None
    return {
        name: tensor[row : row + 1, :length] if tensor.dim() == 2 else tensor[row : row + 1]
        for name, tensor in double(batch).items()
    }


def looped(site: Site, model: nn.Module, wanted: dict[str, Tensor], batch: Batch, reduction: Any) -> State:
    """One backward pass per sample; (samples, *shape) by key."""
    rows: dict[str, list[Tensor]] = {key: [] for key in wanted}
    for row in range(ROWS):
        sample = unpadded(batch, row)
        loss = site.task.sample_losses(site.task.logits(model, sample), sample, reduction).sum()
        for key, grad in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
            rows[key].append(grad)
    return {key: torch.stack(grads) for key, grads in rows.items()}


def dense_weights(site: Site, model: nn.Module, slot: str) -> dict[str, Tensor]:
    weights = {name: model.get_submodule(site.model.paths[name]).weight for name in site.model.shapes.targets}
    return {
        join(slot, name, "delta"): weight.requires_grad_(True)
        for name, weight in weights.items()
        if isinstance(weight, Tensor)
    }


def assert_close(found: State, truth: State, rtol: float = 1e-5) -> None:
    assert found.keys() == truth.keys()
    errors = {key: float((found[key].double() - truth[key]).norm() / truth[key].norm()) for key in truth}
    worst = max(errors, key=lambda key: errors[key])
    assert errors[worst] < rtol, f"{worst}: {errors[worst]:.1e}"


def test_the_samples_have_different_lengths() -> None:
    """Otherwise nothing below would be about padding."""
    for kind in ("bert", "llama", "gpt2"):
        assert len({int(row.sum()) for row in ready(kind)[2]["attention_mask"]}) > 1


@SLOTS
@REDUCTIONS
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_factors_agree_with_a_loop_over_unpadded_samples(kind: str, targets: str, slot: str, reduction: Any) -> None:
    site, state, batch = ready(kind, targets)
    oracle = peft_model(kind, site.model, state, slot).double()
    wanted: dict[str, Tensor] = dict(parameters_of(oracle, site.model, slot))
    assert_close(
        sample_gradients(site, batch, slot, reduction=reduction), looped(site, oracle, wanted, batch, reduction)
    )


@SLOTS
@REDUCTIONS
def test_products_agree_with_a_loop_over_unpadded_samples(kind: str, slot: str, reduction: Any) -> None:
    """The gradient in `delta` is that of the dense weight; heads have no product and keep their own arrays."""
    site, state, batch = ready(kind, "all")
    oracle = dense_model(kind, site.model, state, slot).double()
    wanted = dense_weights(site, oracle, slot)
    truth = looped(site, oracle, wanted, batch, reduction)
    if kind == "gpt2":  # its linears keep their weight as (d_in, d_out)
        truth = {key: value.transpose(1, 2) for key, value in truth.items()}
    found = sample_gradients(site, batch, slot, "product", reduction)
    assert_close({key: value for key, value in found.items() if key in wanted}, truth)
    assert {key.split("/")[1] for key in found.keys() - wanted.keys()} <= set(site.model.shapes.heads)


@SLOTS
@REDUCTIONS
def test_factors_agree_with_vmap(kind: str, slot: str, reduction: Any) -> None:
    site, state, batch = ready(kind)
    oracle = peft_model(kind, site.model, state, slot).double()
    keys = {id(parameter): key for key, parameter in parameters_of(oracle, site.model, slot).items()}
    names = {name: keys[id(parameter)] for name, parameter in oracle.named_parameters() if id(parameter) in keys}
    values = {name: parameter.detach() for name, parameter in oracle.named_parameters() if name in names}
    inputs = {name: tensor for name, tensor in double(batch).items() if name != "labels"}
    if kind == "bert":  # transformers looks at the values of a flat mask, which vmap forbids, but not at a full one
        mask = batch["attention_mask"]
        inputs["attention_mask"] = ((1.0 - mask.double()) * -1e9)[:, None, None].expand(-1, 1, mask.shape[1], -1)

    def loss(values: dict[str, Tensor], inputs: Batch, labels: Tensor, weight: Tensor) -> Tensor:
        logits = torch.func.functional_call(oracle, values, kwargs={k: v[None] for k, v in inputs.items()}).logits[0]
        if labels.dim() == 0:
            return nn.functional.cross_entropy(logits, labels)
        return nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / weight

    tokens = (batch["labels"][:, 1:] != -100).sum(1) if batch["labels"].dim() > 1 else torch.ones(ROWS)
    weights = tokens.double() if reduction == "mean" else torch.ones(ROWS).double()
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(
        values, inputs, batch["labels"], weights
    )
    truth = {names[name]: value for name, value in gradients.items()}
    assert_close(sample_gradients(site, batch, slot, reduction=reduction), truth)


@SLOTS
def test_their_mean_is_the_gradient_of_the_batch(kind: str, slot: str) -> None:
    """Of the mean over samples, which for a language model is not the mean over the batch's tokens."""
    site, _, batch = ready(kind, "all")
    found = sample_gradients(site, batch, slot)
    with site.model.active(slot), site.model.trainable(EVERYTHING):
        site.task.sample_losses(site.logits(batch), batch, "mean").mean().backward()
        truth = {
            key: leaf.grad.double()
            for key, leaf in site.model.leaves(EVERYTHING).items()
            if key.startswith(f"{slot}/") and leaf.grad is not None
        }
    assert_close({key: value.mean(0) for key, value in found.items()}, truth)


def twice(forward: Callable[..., Tensor], x: Tensor, *rest: Any, **options: Any) -> Tensor:
    return forward(forward(x, *rest, **options), *rest, **options)


def test_a_module_that_runs_twice_in_one_pass_adds_up() -> None:
    """As in ALBERT, whose blocks share their weights; every layer of the tiny ViT runs its block two times."""
    site, state, batch = ready("vit", "all")
    oracle = peft_model("vit", site.model, state, "shared").double()
    plain = sample_gradients(site, batch, "shared")
    for model in (site.model.backbone, oracle):
        blocks = [module for module in model.modules() if type(module).__name__ == "ViTLayer"]
        assert len(blocks) == 2
        for block in blocks:
            block.forward = partial(twice, block.forward)
    wanted: dict[str, Tensor] = dict(parameters_of(oracle, site.model, "shared"))
    found = sample_gradients(site, batch, "shared")
    assert_close(found, looped(site, oracle, wanted, batch, "mean"))
    key = "shared/block.00.q_proj/A"
    assert float((found[key] - plain[key]).norm()) > 0.1 * float(plain[key].norm())


@pytest.mark.parametrize("space", ["factors", "product"])
def test_the_statistics_are_the_moments_of_the_loops_gradients_without_the_head(kind: str, space: Any) -> None:
    """The five sums of the statistics for both slots at once, from the dense or the PEFT oracle."""
    site, state, batch = ready(kind)
    site = make_site(kind, TWO, rows=ROWS, model=site.model)
    site.model.load(state)
    batch = site.examples("train").batch(range(ROWS))
    found = estimate(site, Tick("merge", 1, 1, 0), "shared", "personal", Statistics(ROWS), space)
    truth: dict[str, State] = {}
    for slot in ("shared", "personal"):
        wanted: dict[str, Tensor]
        if space == "factors":
            oracle = peft_model(kind, site.model, state, slot).double()
            wanted = dict(parameters_of(oracle, site.model, slot))
        else:
            oracle = dense_model(kind, site.model, state, slot).double()
            wanted = dense_weights(site, oracle, slot)
        each = looped(site, oracle, wanted, batch, "mean")
        dense = space == "product" and kind == "gpt2"
        truth[slot] = {k.partition("/")[2]: (g.transpose(1, 2) if dense else g).flatten(1) for k, g in each.items()}
    assert set(found.spans) == {key for key in truth["shared"] if key.split("/")[0] in site.model.shapes.targets}
    for key, (start, stop) in found.spans.items():
        fed, local = truth["shared"][key], truth["personal"][key]
        expected = torch.stack(
            [fed.sum(0), local.sum(0), fed.square().sum(0), local.square().sum(0), (fed * local).sum(0)]
        )
        sizes = torch.stack(
            [fed.norm(), local.norm(), fed.square().norm(), local.square().norm(), (fed * local).norm()]
        )
        errors = (found.sums[:, start:stop] - expected).norm(dim=1) / sizes
        assert float(errors.max()) < 3e-5, key  # squares double the relative error
