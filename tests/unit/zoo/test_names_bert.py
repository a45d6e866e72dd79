"""The backbones of `names`: what ships, what they know, and what they have not seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scripts.zoo import names_bert

from befit.data.federation import Federation
from befit.data.offline.names import names, names_small
from befit.models import load_backbone
from befit.tasks import make_task
from befit.zoo import zoo_path
from tests.unit.models.tiny_models import Settings


@pytest.fixture(scope="module")
def federation() -> Federation:
    return names()


@pytest.fixture(scope="module")
def tuned() -> tuple[Any, Any]:
    loaded = load_backbone(Settings("names-bert-fl"), "text-classification", names_small().label_names, 0)
    return loaded.model, loaded.processor


@pytest.mark.parametrize("name", ["names-bert-mlm", "names-bert-fl"])
def test_backbones_ship_small_and_pinned(name: str) -> None:
    """(260 + 64 + 2 + 2) x 128 of embeddings; three layers of 4 x (128^2 + 128) + 2 x 128 x 256 + 128 + 256 + 4 x 128;
    and 128^2 + 128 + 516 of pooler and classifier, or as many of the masked head: 456,452."""
    from safetensors.torch import load_file

    folder = zoo_path(name)
    assert folder is not None and (folder / "model.safetensors").stat().st_size < 3_000_000
    held = load_file(folder / "model.safetensors")
    assert sum(value.numel() for value in held.values()) == 456_452
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_every_byte_is_a_token_and_no_text_is_unknown(federation: Federation, tuned: tuple[Any, Any]) -> None:
    made, shipped = names_bert.byte_tokenizer(), tuned[1]
    for client in federation.clients[::4]:
        text = client.train[0]["text"]
        tokens = shipped(text)["input_ids"]
        assert tokens == made(text)["input_ids"] and len(tokens) == len(text.encode()) + 2
        assert shipped.decode(tokens, skip_special_tokens=True) == text
    assert len(shipped) == 260 and shipped.model_max_length == 64
    assert shipped.convert_ids_to_tokens([0, 1, 2, 3]) == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def test_masking_spares_special_tokens_and_hides_eight_of_ten() -> None:
    """20,000 tokens, 15 % of the ordinary half: 1,500 chosen; 80 % masked, 10 % kept, the rest another byte."""
    tokens = torch.cat([torch.full((100, 100), 2), torch.full((100, 100), 77)], dim=1)
    inputs, labels = names_bert.masked(tokens, 3, 260, 0.15, torch.Generator().manual_seed(0))
    chosen = labels != -100
    assert not chosen[:, :100].any() and torch.equal(inputs[~chosen], tokens[~chosen])
    assert int(chosen.sum()) == pytest.approx(1500, abs=150) and bool((labels[chosen] == 77).all())
    seen = inputs[chosen]
    assert float((seen == 3).float().mean()) == pytest.approx(0.8, abs=0.04)
    assert float((seen == 77).float().mean()) == pytest.approx(0.1, abs=0.03)
    assert int(seen[seen != 3].min()) >= 4


def test_the_federated_backbone_knows_the_task_by_half(federation: Federation, tuned: tuple[Any, Any]) -> None:
    """About one half at seen clients and at newcomers, where chance is a quarter: there is something left to adapt.

    Of all test names it is 0.484 and 0.448; a quarter of them is within two points of that."""
    model, tokenizer = tuned
    task = make_task("text-classification", tokenizer, federation.label_names, max_length=64)

    def accuracy(clients: Any) -> float:
        records = [record for client in clients for record in client.test[::4]]
        return task.evaluate(model, task.prepare(records), 256, "cpu")["accuracy"]

    assert accuracy(federation.clients) == pytest.approx(0.484, abs=0.05)
    assert accuracy(federation.newcomers) == pytest.approx(0.448, abs=0.05)


def test_the_masked_backbone_fills_in_bytes_of_names_it_has_not_seen(federation: Federation) -> None:
    """Against 0.07 for the most frequent byte of all."""
    from transformers import BertForMaskedLM

    folder = zoo_path("names-bert-mlm")
    assert folder is not None
    model, tokenizer = BertForMaskedLM.from_pretrained(folder).eval(), names_bert.byte_tokenizer()
    texts = [record["text"] for client in federation.newcomers for record in client.test[:10]]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    inputs, labels = names_bert.masked(tokens["input_ids"], 3, 260, 0.15, torch.Generator().manual_seed(0))
    with torch.no_grad():
        guesses = model(input_ids=inputs, attention_mask=tokens["attention_mask"]).logits.argmax(-1)
    chosen = labels != -100
    assert float((guesses == labels)[chosen].float().mean()) == pytest.approx(0.28, abs=0.05)


def test_neither_test_names_nor_newcomers_reach_the_federated_backbone(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(names_bert.FEDERATED, "rounds", 1)
    monkeypatch.setitem(names_bert.FEDERATED, "cohort", 2)
    folder = zoo_path("names-bert-mlm")
    assert folder is not None
    tokenizer = names_bert.byte_tokenizer()
    bare = replace(federation, clients=tuple(replace(one, test=(), val=()) for one in federation.clients), newcomers=())
    first, second = (names_bert.federated(one, tokenizer, folder).state_dict() for one in (federation, bare))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_both_benchmarks_start_from_the_federated_backbone() -> None:
    from befit.data import registry

    assert {registry.get(name).default_model for name in ("names", "names-small")} == {"names-bert-fl"}
