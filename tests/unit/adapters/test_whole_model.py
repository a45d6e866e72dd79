"""Slots of the whole model against plain torch training of a copy, and as model directories that transformers loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, join, select, slot, slot_of, split
from befit.adapters.layout import Layout, Slot, whole
from befit.adapters.model import AdaptedModel
from befit.adapters.whole_model import WHOLE, embeddings
from befit.core.errors import ModelError
from befit.core.values import Tick
from befit.protocol.method import Deployment
from befit.protocol.settings import TrainSettings
from befit.runs.artifacts import model_weights, without_whole, write_model
from befit.runs.peft_io import write_adapter
from befit.train.loop import train
from befit.train.passes import Pass
from tests.tiny import make_site, random_state, tiny_model

AT = Tick("federate", 1, 1, 0)
PASS = Pass(slot("shared"), ("shared",))
# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def test_training_the_difference_is_training_the_weights(kind: str) -> None:
    """Three steps of SGD on D, beside three steps of torch's own SGD on a copy of the model: W + D = W'."""
    budget = TrainSettings(max_steps=3, batch_size=4, lr=0.05, optimiser="sgd", grad_clip=0.0)
    site = make_site(kind, whole("shared"), budget=budget)
    plain = tiny_model(kind).requires_grad_(True)
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in site.batches("train", 3, AT):
        optimiser.zero_grad()
        site.task.loss(site.task.logits(plain, batch), batch).backward()
        optimiser.step()
    before = copy.deepcopy(site.model.backbone.state_dict())
    train(site, [PASS], AT)
    deployed = Deployment(site.model.dump(EVERYTHING), ("shared",))
    found, expected = model_weights(site.model, deployed), dict(plain.named_parameters())
    assert found.keys() >= expected.keys()
    assert any(not torch.equal(expected[key], value) for key, value in tiny_model(kind).named_parameters())
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=2e-6), key
    assert all(torch.equal(value, before[key]) for key, value in site.model.backbone.state_dict().items())


def test_a_model_directory_gives_the_logits_of_the_slot(kind: str, tmp_path: Path) -> None:
    import transformers

    site = make_site(kind, whole("shared"))
    state = random_state(site.model, size=0.1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "model.safetensors").write_text("not to be copied")
    for client in ("a", "b"):
        write_model(tmp_path / client, Deployment(state, ("shared",)), site.model, tmp_path / "source", tmp_path / "p")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "a" / "model.safetensors").samefile(tmp_path / "b" / "model.safetensors")
    loader = getattr(transformers, type(tiny_model(kind)).__name__)
    loaded, info = loader.from_pretrained(tmp_path / "a", attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    batch = site.examples("test").batch(torch.arange(4))
    site.model.load(state)
    with torch.no_grad():
        with site.model.active("shared"):
            ours = site.logits(batch)
        bare = site.logits(batch)
        assert torch.allclose(site.task.logits(loaded.eval(), batch), ours, atol=1e-5)
    assert not torch.allclose(bare, ours, atol=1e-2)


def test_an_adapter_on_a_changed_backbone_is_the_same_in_PEFT_on_the_written_model(tmp_path: Path) -> None:
    import peft
    from transformers import BertForSequenceClassification

    layout = Layout((Slot("shared", 1, 1.0, head=False, form=WHOLE), Slot("personal", 2, 4.0)))
    site = make_site("bert", layout)
    state = random_state(site.model, size=0.1)
    deployed = Deployment(state, ("shared", "personal"))
    (tmp_path / "source").mkdir()
    write_model(tmp_path / "model", deployed, site.model, tmp_path / "source", tmp_path / "pool")
    from befit.runs.artifacts import folded

    with folded(deployed, site.model):
        write_adapter(
            tmp_path / "adapter",
            without_whole(deployed, site.model),
            site.model,
            base="model",
            task="text-classification",
        )
    base = BertForSequenceClassification.from_pretrained(tmp_path / "model", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    batch = site.examples("test").batch(torch.arange(4))
    site.model.load(state)
    with torch.no_grad(), site.model.active("shared", "personal"):
        assert torch.allclose(site.task.logits(theirs, batch), site.logits(batch), atol=1e-5)


def test_an_error_in_a_forward_pass_leaves_the_backbone_as_it_was() -> None:
    site = make_site("bert", whole("shared"))
    site.model.load(random_state(site.model))
    parameters = dict(site.model.backbone.named_parameters())
    with site.model.active("shared"), pytest.raises(IndexError):
        site.model.backbone(input_ids=torch.full((1, 3), 10**6))
    assert dict(site.model.backbone.named_parameters()) == parameters


def test_embeddings_are_words_positions_and_kinds_and_not_the_norm_after_them() -> None:
    site = make_site("bert", whole("shared"))
    found = {".".join(split(key)[1:]) for key in select(site.model.dump(EVERYTHING), embeddings())}
    prefix = "bert.embeddings."
    assert found == {f"{prefix}{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}


def test_every_architectures_word_for_the_words_embeddings_is_known() -> None:
    for path in ("gpt_neox.embed_in", "model.embed_tokens", "transformer.wte", "roberta.embeddings.word_embeddings"):
        assert embeddings()(join("shared", path, "weight")), path
    assert not embeddings()(join("shared", "lm_head", "weight"))


def test_a_whole_slot_is_only_ever_added_and_wants_weights_that_are_numbers() -> None:
    site = make_site("vit", whole("shared", "personal"))
    with (
        pytest.raises(ValueError, match=r"'shared' .* not gate 1"),
        site.model.active("shared", "personal", mixer="gate 1"),
    ):
        pass
    quantised = tiny_model("vit")
    dense: Any = quantised.get_submodule("classifier")
    dense.weight = torch.nn.Parameter(dense.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"1 weights are not floating-point.*quantise: none"):
        AdaptedModel(quantised).install(whole("shared"), 0)
    assert {slot_of(key) for key in site.model.keys} == {"shared", "personal"}
