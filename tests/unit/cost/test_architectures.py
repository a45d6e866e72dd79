"""Built-in architectures against what is published of them, and configurations from files."""

import json

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig

from befit.adapters.model import model_shapes
from befit.core.errors import ModelError
from befit.cost.architecture import builtin_architectures, find_architecture

# Parameters as published: the safetensors metadata of the checkpoints, for ViT and mBERT the backbones without a head.
PUBLISHED = {
    "vit-b-16": 85_798_656,
    "mbert": 177_853_440,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-4b": 4_022_468_096,
    # Published as 1.4B only. 2*32000*2048 + 24*(4*2048^2 + 3*2048*5632 + 2*2048) + 2048, embeddings not tied.
    "mobilellama-1.4b": 1_364_297_728,
    # The language model, CLIP ViT-L/14-336 (303,507,456) and the projector 1024 -> d -> d with biases.
    "llava-llama-3.2-1b": 1_545_617_408,
    "llava-llama-3.2-3b": 3_528_846_336,
    "llava-llama-3.1-8b": 8_354_748_416,
    "llava-qwen2.5-0.5b": 799_262_336,
    "llava-qwen2.5-1.5b": 1_851_156_992,
    "llava-qwen2.5-3b": 3_395_741_696,
}
# Width of the residual stream, of all queries, and of all keys: hidden, heads * head_dim, kv heads * head_dim.
WIDTHS = {
    "vit-b-16": (768, 768, 768),
    "mbert": (768, 768, 768),
    "llama-3.2-1b": (2048, 2048, 512),
    "llama-3.2-3b": (3072, 3072, 1024),
    "llama-3.1-8b": (4096, 4096, 1024),
    "qwen2.5-0.5b": (896, 896, 128),
    "qwen2.5-1.5b": (1536, 1536, 256),
    "qwen2.5-3b": (2048, 2048, 256),
    "qwen3-4b": (2560, 4096, 1024),
    "mobilellama-1.4b": (2048, 2048, 2048),
    "llava-llama-3.2-1b": (2048, 2048, 512),
    "llava-llama-3.2-3b": (3072, 3072, 1024),
    "llava-llama-3.1-8b": (4096, 4096, 1024),
    "llava-qwen2.5-0.5b": (896, 896, 128),
    "llava-qwen2.5-1.5b": (1536, 1536, 256),
    "llava-qwen2.5-3b": (2048, 2048, 256),
}


def test_every_architecture_has_its_published_number_here():
    assert set(builtin_architectures()) == PUBLISHED.keys() == WIDTHS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    """A classifier's head for c classes is 768 c + c more."""
    found = find_architecture(name)
    model = found.skeleton(labels=10)
    head = 0 if found.task in ("causal-lm", "vqa") else 7_690
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name] + head
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", WIDTHS)
def test_projections_have_the_widths_of_the_published_heads(name):
    hidden, queries, keys = WIDTHS[name]
    shapes = model_shapes(find_architecture(name).skeleton(), ("q_proj", "k_proj", "v_proj"), head=False)
    found = {(one.rpartition(".")[2], shape.d_in, shape.d_out) for one, shape in shapes.targets.items()}
    assert found == {("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys)}


@pytest.mark.parametrize("name", ["Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct", "META-LLAMA/llama-3.2-3b"])
def test_an_architecture_is_found_by_name_or_hub_id_in_any_case(name):
    assert find_architecture(name).name == "llama-3.2-3b"


def test_no_hub_id_stands_for_two_architectures():
    ids = [hub.lower() for entry in builtin_architectures().values() for hub in entry["hub"]]
    assert len(set(ids)) == len(ids)


@pytest.fixture
def llama(tmp_path):
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=32
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("part", ["", "config.json"])
def test_a_configuration_is_read_from_a_directory_or_a_file(llama, part):
    shapes = model_shapes(find_architecture(str(llama / part)).skeleton(), "auto", head=False)
    assert len(shapes.targets) == 6
    assert {(shape.d_in, shape.d_out) for shape in shapes.targets.values()} == {(16, 16)}


def test_a_file_may_have_any_name(llama):
    (llama / "config.json").rename(llama / "mine.json")
    assert find_architecture(str(llama / "mine.json")).config.hidden_size == 16


def test_no_weights_and_no_network_are_needed(llama, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a network was asked"))
    assert not list(llama.glob("*.safetensors"))
    find_architecture(str(llama)).skeleton()
    with pytest.raises(ModelError, match="'some-owner/some-model'"):
        find_architecture("some-owner/some-model")


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (ViTConfig(), "image-classification"),
        (BertConfig(), "text-classification"),
        (BertConfig(is_decoder=True), "causal-lm"),
        (BertConfig(architectures=["BertForMaskedLM"]), "text-classification"),
        (GPT2Config(architectures=["GPT2LMHeadModel"]), "causal-lm"),
        (LlamaConfig(), "causal-lm"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "text-classification"),
    ],
)
def test_the_task_follows_from_the_saved_class_or_the_model_type(tmp_path, config, task):
    config.save_pretrained(tmp_path)
    assert find_architecture(str(tmp_path)).task == task
    assert find_architecture(str(tmp_path), task="text-classification").task == "text-classification"


def test_a_model_that_ships_is_an_architecture_too():
    assert find_architecture("digits-vit").task == "image-classification"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{broken", "config.json: is not JSON"),
        ("[]", "describes no model"),
        ('{"model_type": "no-such"}', "no-such"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "describes no model"),
        ('{"model_type": "wav2vec2"}', "none of the tasks.*--task"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_clear_error(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=words) as caught:
        find_architecture(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_sizes_that_fit_nothing_are_refused_when_the_model_is_built(tmp_path):
    values = {"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"cannot be built for text-classification.*hidden size"):
        find_architecture(str(tmp_path)).skeleton()


def test_a_size_of_zero_is_a_user_s_mistake_and_not_a_defect(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit", "patch_size": 0}')
    with pytest.raises(ModelError, match=r"cannot be built for image-classification: .*zero"):
        find_architecture(str(tmp_path)).skeleton()


def test_an_encoder_is_refused_as_a_language_model():
    with pytest.raises(ModelError, match=r"bert encoder.* causal-lm"):
        find_architecture("mbert", task="causal-lm").skeleton()


def test_an_unknown_name_is_met_with_a_suggestion_and_the_list():
    with pytest.raises(ModelError, match=r"Did you mean: qwen3-4b\?") as caught:
        find_architecture("qwen-4b")
    assert all(name in str(caught.value) for name in PUBLISHED)


def test_a_directory_without_a_configuration_says_so(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_architecture(str(tmp_path))
