"""One backbone with slots: what moves, what takes part, what gets gradients, and what never changes."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.ao.nn.quantized.dynamic as quantised
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForSequenceClassification

from befit.adapters.flat import FlatState
from befit.adapters.keys import EVERYTHING, factor, slot
from befit.adapters.layer import LoraBranch
from befit.adapters.layout import Layout, Slot, lora
from befit.adapters.model import AdaptedModel, find_modules
from befit.core.errors import ModelError, PayloadMismatch
from befit.core.values import TensorSpec, Tick
from befit.train.loop import train
from befit.train.passes import Pass
from tests.tiny import assert_same, make_site, random_state, tiny_model

TWO = lora(2, 6.0, slots=("shared", "personal"))
AT = Tick("federate", 1, 1, 0)


def test_training_leaves_the_backbone_bit_identical_and_unwrap_gives_it_back(kind: str) -> None:
    before = {key: value.clone() for key, value in tiny_model(kind).state_dict().items()}
    classes = {name: type(module) for name, module in tiny_model(kind).named_modules()}
    site = make_site(kind, targets="all")
    train(site, [Pass(EVERYTHING, ("shared",))], AT)
    assert_same(dict(site.model.unwrap().state_dict()), before)
    assert {name: type(module) for name, module in site.model.backbone.named_modules()} == classes


def test_reset_load_and_dump_move_values_and_copies_stay_apart() -> None:
    model = make_site("bert", TWO).model
    fresh, values = model.dump(EVERYTHING), random_state(model)
    model.load(values)
    dumped = model.dump(EVERYTHING)
    assert_same(dumped, values)
    dumped["shared/block.00.q_proj/A"].zero_()
    values["shared/block.00.v_proj/A"].zero_()
    assert_same(model.dump(EVERYTHING), random_state(model))
    model.reset()
    assert_same(model.dump(EVERYTHING), fresh)


@pytest.mark.parametrize(
    "chosen",
    [
        EVERYTHING,
        slot("personal"),
        factor("A"),
        factor("B"),
        factor("bias"),
        slot("shared") & ~factor("A"),
        factor("A") | factor("weight"),
    ],
    ids=str,
)
def test_dump_holds_the_chosen_keys_with_their_own_values(chosen) -> None:
    """Whatever way the selection cuts the buffer into runs."""
    model = make_site("bert", TWO).model
    values = random_state(model)
    model.load(values)
    assert_same(model.dump(chosen), {key: tensor for key, tensor in values.items() if chosen(key)})


def test_using_lends_values_and_slots_and_takes_them_back_even_after_an_error() -> None:
    site = make_site("bert", TWO)
    batch, model = site.examples("train").batch(range(4)), site.model
    before, values = model.dump(EVERYTHING), random_state(model)
    with torch.no_grad():
        bare = site.logits(batch)
        with model.using(values, "shared", "personal"):
            assert not torch.allclose(site.logits(batch), bare, atol=1e-2)
        with pytest.raises(ZeroDivisionError), model.using(values, "shared"):
            raise ZeroDivisionError
        with pytest.raises(PayloadMismatch, match="nowhere"), model.using({**values, "nowhere/x/A": bare}, "shared"):
            pass
        assert_same(model.dump(EVERYTHING), before)
        assert torch.equal(site.logits(batch), bare)


def test_a_slot_that_is_not_active_changes_nothing_and_gets_no_gradient(kind: str) -> None:
    site = make_site(kind, TWO)
    model, batch = site.model, site.examples("train").batch(range(4))
    values = random_state(model)
    model.load(values)
    with model.active("shared"), model.trainable(EVERYTHING):
        logits = site.logits(batch)
        site.task.loss(logits, batch).backward()
    for key, leaf in model.leaves(EVERYTHING).items():
        assert leaf.grad is not None
        assert bool(leaf.grad.any()) == key.startswith("shared/"), key
    model.load({key: tensor * 2 for key, tensor in values.items() if key.startswith("personal/")})
    with model.active("shared"), torch.no_grad():
        assert torch.equal(site.logits(batch), logits)


def test_gradients_reach_only_what_is_trainable() -> None:
    site = make_site("bert", TWO)
    model, batch, chosen = site.model, site.examples("train").batch(range(4)), slot("personal") & factor("B")
    model.load(random_state(model))
    with model.active("shared", "personal"), model.trainable(chosen):
        site.loss(batch).backward()
    for key, leaf in model.leaves(EVERYTHING).items():
        assert leaf.grad is not None and bool(leaf.grad.any()) == chosen(key), key
        assert not leaf.requires_grad
    model.zero_gradients()
    assert not any(bool(leaf.grad.any()) for leaf in model.leaves(EVERYTHING).values() if leaf.grad is not None)


def test_slots_of_one_rank_start_alike_and_another_seed_starts_elsewhere() -> None:
    model = make_site("bert", TWO).model
    first = model.dump(EVERYTHING)
    for key in model.dump(slot("shared")):
        assert torch.equal(first[key], first[key.replace("shared/", "personal/")])
    assert all(bool(tensor.any()) == key.endswith("/A") for key, tensor in first.items())
    bound = 16**-0.5  # U(-1/sqrt(d_in), 1/sqrt(d_in)), as PEFT
    values = torch.cat([tensor.flatten() for key, tensor in first.items() if key.endswith("/A")])
    assert 0.95 * bound < float(values.abs().max()) <= bound
    model.install(TWO, seed=1)
    other = model.dump(EVERYTHING)
    assert not any(torch.equal(first[key], other[key]) for key in first if key.endswith("/A"))


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("vit", ["block.00.q_proj", "block.00.v_proj", "block.01.q_proj", "block.01.v_proj"]),
        ("bert", ["block.00.q_proj", "block.00.v_proj", "block.01.q_proj", "block.01.v_proj"]),
        ("llama", ["block.00.q_proj", "block.00.v_proj", "block.01.q_proj", "block.01.v_proj"]),
        ("gpt2", ["block.00.qkv_proj", "block.01.qkv_proj"]),
    ],
)
def test_projections_have_the_same_name_in_every_architecture(architecture: str, names: list[str]) -> None:
    assert list(AdaptedModel(tiny_model(architecture)).shapes.targets) == names


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "config", "auto", "linears"),
    [
        ("DistilBertForSequenceClassification", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}, 4, 12),
        ("DebertaV2ForSequenceClassification", SMALL, 4, 12),
        ("MPNetForSequenceClassification", SMALL, 4, 12),
        ("ModernBertForSequenceClassification", SMALL, 2, 8),
        ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}, 2, 8),
        ("GPTNeoXForCausalLM", SMALL, 2, 8),
    ],
)
def test_query_and_value_are_found_in_many_families(kind: str, config: dict[str, Any], auto: int, linears: int) -> None:
    model = getattr(transformers, kind)(getattr(transformers, kind.split("For")[0] + "Config")(**config))
    assert len(find_modules(model, "auto")[0]) == auto
    assert len(find_modules(model, "all")[0]) == linears


@pytest.mark.parametrize("kind", ["CLIP", "MetaClip2", "Siglip", "Siglip2"])
def test_image_classifiers_that_are_half_of_a_larger_model_have_projections_and_a_head(kind: str) -> None:
    """Their backbone is not the child that `base_model_prefix` names, which is the model of images and texts."""
    sizes = {name: SMALL[name] for name in SMALL if name not in ("vocab_size", "pad_token_id")}
    config = getattr(transformers, f"{kind}Config")(vision_config={**sizes, "image_size": 8, "patch_size": 4})
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    targets, head = find_modules(model, "auto")
    assert list(targets) == ["block.00.q_proj", "block.00.v_proj", "block.01.q_proj", "block.01.v_proj"]
    assert list(head) == ["classifier"] and len(find_modules(model, "all")[0]) == 12


def test_all_is_every_linear_of_both_towers_of_an_encoder_decoder() -> None:
    sizes = {f"{tower}_{what}": 2 for tower in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50, **sizes)
    model = transformers.BartForSequenceClassification(config)
    inside = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and ".layers." in name}
    assert set(find_modules(model, "all")[0].values()) == inside and len(inside) == 32


def test_auto_says_what_it_did_not_find() -> None:
    config = transformers.AlbertConfig(embedding_size=8, **SMALL)
    with pytest.raises(ModelError, match="auto finds no query and value projections; the blocks of Albert"):
        find_modules(transformers.AlbertForSequenceClassification(config), "auto")


def test_every_linear_of_a_block_has_a_canonical_name(kind: str) -> None:
    found = {name.split(".", 2)[2] for name in AdaptedModel(tiny_model(kind), "all").shapes.targets}
    attention = {"qkv_proj", "o_proj"} if kind == "gpt2" else {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert found == attention | {"up_proj", "down_proj"} | ({"gate_proj"} if kind == "llama" else set())


@pytest.mark.parametrize(
    "target", ["q_proj", "query", "attention.self.query", "bert.encoder.layer.1.attention.self.query"]
)
def test_a_target_may_be_named_canonically_or_as_the_model_does(target: str) -> None:
    found = list(AdaptedModel(tiny_model("bert"), [target]).shapes.targets)
    assert found == ["block.01.q_proj"] if target.startswith("bert.") else ["block.00.q_proj", "block.01.q_proj"]


def test_a_target_that_matches_nothing_is_named_with_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"'q_porj'.*BertForSequenceClassification have .*Did you mean: q_proj\?"):
        AdaptedModel(tiny_model("bert"), ["v_proj", "q_porj"])


def test_an_unknown_slot_or_key_is_named() -> None:
    model = make_site("bert", TWO).model
    with pytest.raises(ValueError, match=r"'sharde'.*Did you mean: shared"), model.active("sharde"):
        pass
    with pytest.raises(PayloadMismatch, match="other/block"):
        model.load({"other/block.00.q_proj/A": torch.zeros(2, 16)})
    with pytest.raises(PayloadMismatch, match=r"\(3, 16\).*\(2, 16\)"):
        model.load({"shared/block.00.q_proj/A": torch.zeros(3, 16)})


def test_gates_weigh_per_token_and_their_weights_sum_to_one() -> None:
    """With both slots equal, a gate whose weights sum to 1 at every token leaves exactly one slot's output."""
    slots = ("shared", "personal")
    site = make_site("bert", lora(2, 6.0, slots=slots, gated=slots))
    model, batch = site.model, site.examples("train").batch(range(4))
    values = random_state(model)
    same = {key: values[key.replace("personal/", "shared/")] for key in values}
    model.load(same)
    with torch.no_grad():
        with model.active("shared"):
            one = site.logits(batch)
        with model.active(*slots, mixer="gate"):
            torch.testing.assert_close(site.logits(batch), one, rtol=1e-4, atol=1e-5)
    model.load(values)
    layer = model.layers["block.00.q_proj"]
    x = torch.randn(3, 5, 16)
    weights = torch.softmax(x @ values["gate/block.00.q_proj/G"].T, -1)
    expected = layer.base(x)
    for row, name in enumerate(slots):
        A, B = (values[f"{name}/block.00.q_proj/{part}"] for part in "AB")
        expected = expected + 3.0 * weights[..., row : row + 1] * (x @ A.T @ B.T)
    with model.active(*slots, mixer="gate"), torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_adapter_dropout_hits_low_rank_inputs_in_training_only_and_never_the_head() -> None:
    """A dense head has no LoRA dropout, in PEFT neither: dropping half its input would be another model."""
    site = make_site("bert", lora(2, 6.0), adapter_dropout=0.5)
    model = site.model
    values = random_state(model)
    model.load(values)
    x = torch.randn(4, 6, 16)
    A, B = (values[f"shared/block.00.q_proj/{part}"] for part in "AB")
    weight, bias = (values[f"shared/classifier/{part}"] for part in ("weight", "bias"))
    projection, head = model.layers["block.00.q_proj"], model.layers["classifier"]
    with torch.no_grad(), model.active("shared"):
        full = projection.base(x) + 3.0 * x @ A.T @ B.T
        torch.testing.assert_close(projection(x), full, rtol=1e-5, atol=1e-5)
        with model.training(True):
            torch.manual_seed(0)
            dropped = projection(x)
            torch.manual_seed(0)
            torch.testing.assert_close(
                dropped, projection.base(x) + 3.0 * F.dropout(x, 0.5) @ A.T @ B.T, rtol=1e-5, atol=1e-5
            )
            assert not torch.allclose(dropped, full, atol=1e-2)
            torch.testing.assert_close(head(x), head.base(x) + F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


class Int8Linear(nn.Module):
    """A linear map whose weight is kept in 8 bits with one scale per row, as quantisers do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.register_buffer("steps", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", (linear.weight.detach() / self.steps).round().to(torch.int8))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.steps, self.bias)  # pyright: ignore


def torch_int8(linear: nn.Linear) -> nn.Module:
    """torch's own, whose weight is a packed object and whose output has no gradient in its input."""
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig  # pyright: ignore
    return quantised.Linear.from_float(linear)


@pytest.mark.parametrize("quantise", [Int8Linear, torch_int8])
def test_a_quantised_linear_carries_adapters(quantise) -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), quantise(nn.Linear(8, 6)))
    x = torch.randn(5, 8)
    bare = backbone(x).detach()
    model = AdaptedModel(backbone, ["2"], head=False)
    model.install(Layout((Slot("shared", 2, 6.0),)), seed=0)
    values = random_state(model)
    model.load(values)
    hidden = backbone[1](backbone[0](x)).detach()
    A, B = values["shared/2/A"], values["shared/2/B"]
    with model.active("shared"), model.trainable(EVERYTHING):
        output = backbone(x)
        torch.testing.assert_close(output, bare + 3.0 * hidden @ A.T @ B.T, rtol=1e-5, atol=1e-5)
        output.square().sum().backward()
    grads = {key: leaf.grad for key, leaf in model.leaves(EVERYTHING).items()}
    outer = 2 * output.detach()
    torch.testing.assert_close(grads["shared/2/B"], 3.0 * outer.T @ (hidden @ A.T), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads["shared/2/A"], 3.0 * B.T @ outer.T @ hidden, rtol=1e-4, atol=1e-4)


SPECS = {
    "a/x/A": TensorSpec((2, 3)),
    "a/y/A": TensorSpec((3, 3)),
    "a/x/B": TensorSpec((4, 2)),
    "b/x/A": TensorSpec((2, 3)),
    "b/x/B": TensorSpec((4, 2)),
}


@pytest.mark.parametrize(
    ("chosen", "runs"),
    [
        (EVERYTHING, [6 + 9 + 8 + 6 + 8]),
        (slot("a"), [23]),
        (slot("b"), [14]),
        (factor("A"), [15, 6]),
        (factor("B"), [8, 8]),
        (factor("B") | slot("b"), [22]),
        (factor("G"), []),
    ],
    ids=str,
)
def test_neighbours_in_the_buffer_become_one_parameter(chosen, runs: list[int]) -> None:
    assert [len(p) for p in FlatState(SPECS, torch.device("cpu")).parameters(chosen)] == runs


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.02, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
    ],
    ids=["adamw", "sgd"],
)
def test_an_optimiser_on_runs_equals_one_on_single_tensors_bit_for_bit(make) -> None:
    flat = FlatState(SPECS, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    values = {key: torch.randn(spec.shape, generator=draw) for key, spec in SPECS.items()}
    flat.load(values)
    single = {key: nn.Parameter(tensor.clone()) for key, tensor in values.items() if factor("A")(key)}
    optimisers = make(flat.parameters(factor("A"))), make(list(single.values()))
    for _ in range(4):
        flat.zero_gradients()
        flat.require_gradients(factor("A"), True)
        for leaves in (flat.leaves, single):
            loss = sum((leaves[key].sin() * leaves[key].square()).sum() for key in single)
            assert isinstance(loss, Tensor)
            loss.backward()
        flat.require_gradients(factor("A"), False)
        for optimiser in optimisers:
            optimiser.step()
        optimisers[1].zero_grad()
    found = flat.dump(EVERYTHING)
    for key, tensor in found.items():
        assert torch.equal(tensor, single[key].detach() if key in single else values[key]), key
        assert torch.equal(tensor, values[key]) != (key in single), key


def test_leaves_and_parameters_share_storage() -> None:
    flat = FlatState(SPECS, torch.device("cpu"))
    (parameter,) = flat.parameters(slot("b"))
    with torch.no_grad():
        parameter.fill_(2.0)
        parameter.grad.fill_(3.0)  # pyright: ignore
    for key, leaf in flat.leaves.items():
        assert leaf.grad is not None
        assert bool((leaf == (2.0 if key.startswith("b/") else 0.0)).all())
        assert bool((leaf.grad == (3.0 if key.startswith("b/") else 0.0)).all())


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_query_and_value_are_found_whatever_this_release_of_the_model_calls_them(kind: str) -> None:
    by_old_name, _ = find_modules(tiny_model(kind), ("query", "value"))
    canonical, _ = find_modules(tiny_model(kind), ("q_proj", "v_proj"))
    assert by_old_name == canonical and len(canonical) == 4


@pytest.mark.parametrize("kind", ["vit", "bert", "llama", "gpt2"])
def test_all_linear_is_what_peft_adapts_by_that_name(kind: str) -> None:
    """Without a task type, as in FedP2EFT's released code: pooler and classifier are in, an output embedding is out."""
    config = peft.LoraConfig(target_modules="all-linear")
    theirs = peft.tuners.tuners_utils._maybe_include_all_linear_layers(config, tiny_model(kind)).target_modules  # type: ignore[attr-defined]
    targets, head = find_modules(tiny_model(kind), "all-linear")
    assert set(targets.values()) == theirs
    assert set(head.values()) <= theirs and ("classifier" in head) == (kind in ("vit", "bert"))


def test_a_head_is_a_target_where_it_is_named_and_then_no_dense_update() -> None:
    model = AdaptedModel(tiny_model("bert"), ("q_proj", "classifier"))
    low_rank = Slot("own", 2, 4.0)
    assert list(low_rank.adapted(model.shapes)) == ["block.00.q_proj", "block.01.q_proj", "classifier"]
    model.install(Layout((low_rank, Slot("base", 2, 4.0, targets=("query",)))), seed=0)
    at_head = {key for key in model.keys if "/classifier/" in key}
    assert at_head == {"own/classifier/A", "own/classifier/B", "base/classifier/weight", "base/classifier/bias"}
    state = random_state(model)
    task = make_site("bert").task
    batch = make_site("bert").examples("test").batch(range(6))
    with model.using(state, "own", "base"), torch.no_grad():
        both = task.logits(model.backbone, batch)
    bare = tiny_model("bert")
    with torch.no_grad():
        for name in ("block.00.q_proj", "block.01.q_proj", "classifier"):
            weight = bare.get_submodule(model.paths[name]).weight
            assert isinstance(weight, torch.Tensor)
            for slot_name in ("own", "base") if name != "classifier" else ("own",):
                weight.add_(2.0 * state[f"{slot_name}/{name}/B"] @ state[f"{slot_name}/{name}/A"])
        bare.classifier.weight.add_(state["base/classifier/weight"])  # type: ignore[union-attr]
        bare.classifier.bias.add_(state["base/classifier/bias"])  # type: ignore[union-attr]
        torch.testing.assert_close(both, task.logits(bare, batch), rtol=1e-4, atol=1e-5)


def test_a_word_that_blocks_have_too_does_not_mean_the_head() -> None:
    config = RobertaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    with torch.device("meta"):
        model = RobertaForSequenceClassification(config)
    assert "classifier.dense" not in find_modules(model, ("dense",))[0]
    assert list(find_modules(model, ("classifier.dense", "out_proj"))[0]) == ["classifier.dense", "classifier.out_proj"]


def test_training_mode_is_that_of_every_module(kind: str) -> None:
    model = AdaptedModel(tiny_model(kind, dropout=0.5), head=kind in ("vit", "bert"))
    with model.training(True):
        assert all(module.training for module in model.backbone.modules())
        with model.training(False):
            assert not any(module.training for module in model.backbone.modules())
        assert all(module.training for module in model.backbone.modules())
    assert not any(module.training for module in model.backbone.modules())


class Bent(LoraBranch):
    """No affine map: what is below zero between A and B is cut off."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.A).relu(), self.B)


class Capped(LoraBranch):
    """An affine map of small inputs alone."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.A).clamp(-20, 20), self.B)


@pytest.mark.parametrize("kind", [LoraBranch, Bent, Capped])
def test_a_branch_that_is_no_affine_map_is_scored_as_it_is(kind: type[LoraBranch]) -> None:
    site = make_site("vit", TWO)
    model, calls = site.model, list[nn.Module]()
    model.load(random_state(model))
    for layer in model.layers.values():
        layer.base.register_forward_hook(lambda base, *_: calls.append(base))
        for name, branch in layer.branches.items():
            if isinstance(branch, LoraBranch):
                layer.branches[name] = kind(branch.A, branch.B, branch.scale)
    batch = site.examples("test").batch(range(2))
    with torch.no_grad(), model.active("shared", "personal"):
        active = site.logits(batch)
    with torch.no_grad(), model.scoring("shared", "personal"):
        calls.clear()
        scored = site.logits(batch)
    torch.testing.assert_close(scored, active, rtol=1e-4, atol=1e-4)
    assert len(calls) == (0 if kind is LoraBranch else len(model.shapes.targets))
