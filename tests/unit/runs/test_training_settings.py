"""Settings of training that depend on a client's own examples: passes over them, and weights of their classes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.flower.amounts import exceeded, too_many_passes
from befit.flower.site_file import Limits
from befit.protocol.registry import build_method
from befit.runs.host import Host, shared
from befit.runs.runner import check, run
from befit.studies.compare.choice import equal_steps
from tests.unit.models.tiny_models import save_llama

# PEFT asks transformers by a name that transformers 5 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def settings(**train: Any) -> dict[str, Any]:
    return {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 0.5},
        "method": "fedit",
        "baselines": [],
        "train": {"batch_size": 40, **train},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }


def test_every_client_passes_over_its_own_examples(tmp_path: Path) -> None:
    done = run(settings(epochs=2), out=tmp_path / "run")
    lines = [json.loads(line) for line in (done.path / "metrics.jsonl").read_text().splitlines()]
    steps = {line["client"]: line["steps"] for line in lines if line["kind"] == "train"}
    counts = {info.id: info.num_examples for info in Host(load_experiment(settings())).infos}
    assert steps == {client: 2 * -(-count // 40) for client, count in counts.items()}
    assert len(set(steps.values())) > 1


def test_training_examples_have_weights_and_no_others_also_where_a_host_serves_two_runs() -> None:
    plain, weighted = (load_experiment(settings(class_weights=how)) for how in ("none", "balanced"))
    assert shared(plain) == shared(weighted)  # so a comparison gives both the same host
    host = Host(weighted)
    client = host.infos[0].id
    weights = host.examples(client, "train").batch([0, 1, 2])["weights"]
    assert len(weights) == 3 and float(weights.min()) > 0
    assert "weights" not in host.examples(client, "test").batch([0])
    host.experiment = plain
    assert "weights" not in host.examples(client, "train").batch([0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train": {"epochs": 1}, "stream": {"kind": "static"}}, "train.epochs: training data that arrives over time"),
        (
            {"train": {"class_weights": "balanced"}, "benchmark": "skills"},
            "train.class_weights: causal-lm has no classes",
        ),
        ({"train": {"epochs": 0}}, "train.epochs: must be positive"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment({**settings(), **change})
    assert told in str(caught.value)


def test_the_estimate_counts_the_examples_that_go_through_the_model_at_once() -> None:
    whole, parts = (check(settings(micro_batch=size))["memory_parts_mib"]["activations"] for size in (None, 10))
    assert whole == pytest.approx(4 * parts)


def test_equal_compute_counts_steps_and_refuses_passes() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs is by a client's examples"):
        equal_steps(load_experiment(settings(epochs=1)), 1, 5)


def test_a_site_holds_passes_to_its_most_steps() -> None:
    experiment = load_experiment(settings(epochs=3))
    limits = replace(Limits(), max_steps=20)
    assert not [*exceeded(experiment, build_method(experiment.method), limits)]
    assert not [*too_many_passes(240, experiment, limits)]  # 3 x 6 steps
    assert [*too_many_passes(241, experiment, limits)] == [
        "train.epochs: the steps of 3 passes: 21 is more than the site allows, 20 (limits.max_steps)"
    ]


def language(folder: Path, adapter: dict[str, Any], **method: Any) -> dict[str, Any]:
    """Two clients with a tiny language model."""
    rows = [{"prompt": "copy a b", "completion": "a b"}, {"prompt": "copy c", "completion": "c"}] * 5
    for client in ("a", "b"):
        (folder / f"{client}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "data": {"task": "causal-lm", "clients": {client: str(folder / f"{client}.jsonl") for client in ("a", "b")}},
        "model": {"id": str(folder / "model")},
        "method": {"name": "fedit", "rank": 2, "alpha": 6.0, **method},
        "baselines": [],
        "adapter": adapter,
        "train": {"max_steps": 1, "lr": 1e-30, "optimiser": "sgd"},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }


def peft_adapter(folder: Path, **config: Any) -> Any:
    """A PEFT model with a random adapter, saved to `folder / adapter`."""
    save_llama(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **config)
    model = peft.get_peft_model(base, wanted)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(str(folder / "adapter"))
    return model.eval()


def test_training_starts_from_an_adapter_of_peft(tmp_path: Path) -> None:
    oracle = peft_adapter(tmp_path, lora_alpha=6.0)
    host = Host(load_experiment(language(tmp_path, {"start": str(tmp_path / "adapter")})))
    site = host.install(host.build(host.experiment.method))
    tokens = torch.tensor([[2, 22, 9, 10, 3]])
    with host.model.active("shared"):
        here = host.model.backbone(tokens).logits
    expected = oracle(tokens).logits
    torch.testing.assert_close(here, expected, rtol=1e-4, atol=1e-5)
    assert any(bool(value.any()) for key, value in site.initial.items() if key.endswith("/B"))  # the server's start too
    done = run(language(tmp_path, {"start": str(tmp_path / "adapter")}), out=tmp_path / "run")
    kept = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), str(done.path / "clients" / "a" / "adapter")
    ).eval()
    torch.testing.assert_close(kept(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_with_rank_stabilised_scale_says_which_alpha_it_has(tmp_path: Path) -> None:
    peft_adapter(tmp_path, lora_alpha=6.0, use_rslora=True)
    adapter = {"start": str(tmp_path / "adapter")}
    with pytest.raises(ConfigError, match=r"lora_alpha is 6\.0 with use_rslora, an alpha of 8\.48528137, .* has 8\.5"):
        check(language(tmp_path, adapter, alpha=8.5))
    check(language(tmp_path, adapter, alpha=8.48528137))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"rank": 4}, "method fedit: adapter.start: .*: r is 2, slot 'shared' has 4"),
        ({"alpha": 7.0}, "method fedit: adapter.start: .*: lora_alpha is 6.0, slot 'shared' has 7"),
        ({"start": "nowhere"}, "adapter.start: .*nowhere is no folder of a PEFT adapter"),
        ({"targets": ["q_proj"]}, "it adapts .*v_proj too; its targets differ"),
        ({"targets": ["q_proj", "k_proj", "v_proj"]}, "it has no adapter of .*k_proj; its targets differ"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_there_is_a_run(
    tmp_path: Path, method: dict[str, Any], told: str
) -> None:
    peft_adapter(tmp_path, lora_alpha=6.0)
    adapter = {"start": str(tmp_path / "adapter"), **{k: v for k, v in method.items() if k in ("start", "targets")}}
    options = {key: value for key, value in method.items() if key not in adapter}
    settings = language(tmp_path, adapter, **options)
    for refuses in (check, lambda settings: run(settings, out=tmp_path / "run")):
        with pytest.raises(ConfigError, match=told):
            refuses(settings)
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    def settings(classes: int, **adapter: str) -> dict[str, Any]:
        rows = [{"text": f"word {n}", "label": n % classes} for n in range(24)]
        (tmp_path / f"{classes}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {
            "data": {"task": "text-classification", "clients": {"a": str(tmp_path / f"{classes}.jsonl")}},
            "model": {"id": "names-bert-mlm", "max_length": 16},
            "method": {"name": "fedit", "rank": 2},
            "baselines": [],
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
            "report": {"plots": False},
            "adapter": adapter,
        }

    first = run(settings(4), out=tmp_path / "four").path / "clients" / "a" / "adapter"
    told = r"method fedit: adapter\.start: .*classifier\.weight is 4 x \d+ there, 2 x \d+ in this model"
    for refuses in (check, lambda settings: run(settings, out=tmp_path / "two")):
        with pytest.raises(ConfigError, match=told):
            refuses(settings(2, start=str(first)))
    assert not (tmp_path / "two").exists()
    assert check(settings(4, start=str(first)))
    assert run(settings(4, start=str(first)), out=tmp_path / "again").results["clients"]["a"]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("fedavg", "trains no low-rank adapter"),
        ("fedalt", "trains no low-rank adapter"),  # its first slot is the mean of what the other clients have trained
        ("flora", "draw their adapter anew"),
        ("relora", "draw their adapter anew"),
        ({"name": "lora", "base": {"name": "flora"}}, "draw their adapter anew"),
    ],
)
def test_a_method_that_would_not_start_from_the_adapter_is_refused(tmp_path: Path, method: Any, told: str) -> None:
    save_llama(tmp_path / "model")
    settings = {**language(tmp_path, {"start": str(tmp_path / "adapter")}), "method": method}
    for refuses in (check, lambda settings: run(settings, out=tmp_path / "run")):
        with pytest.raises(ConfigError, match=rf"adapter\.start: .*{told}"):
            refuses(settings)


@pytest.mark.parametrize(
    ("method", "slots"),
    [
        ("fedit", ["shared"]),
        ("local", ["personal"]),
        ("guidance", ["shared", "personal"]),
        ("potara", ["shared", "personal", "merged"]),
        ("fisher_merging", ["shared", "personal"]),
        ("feddpa", ["shared"]),  # with the adapter in both, their sum would have it twice
    ],
)
def test_what_is_merged_later_starts_from_the_adapter_alike(method: str, slots: list[str]) -> None:
    assert build_method(method).starting() == slots


@pytest.mark.parametrize("method", ["guidance", "interpolation", "fisher_merging"])
def test_branches_and_guided_clients_start_from_the_adapter(tmp_path: Path, method: str) -> None:
    oracle = peft_adapter(tmp_path, lora_alpha=6.0)
    settings = language(tmp_path, {"start": str(tmp_path / "adapter")}, name=method)
    done = run(settings, out=tmp_path / "run")
    kept = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), str(done.path / "clients" / "a" / "adapter")
    ).eval()
    tokens = torch.tensor([[2, 22, 9, 10, 3]])
    torch.testing.assert_close(kept(tokens).logits, oracle(tokens).logits, rtol=1e-4, atol=1e-5)


def test_no_adapter_can_be_started_from_at_sites_or_from_nowhere(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"adapter\.start: no site has the adapter's folder"):
        load_experiment({**language(tmp_path, {"start": "x"}), "engine": {"kind": "flower"}})


@torch.no_grad()
def test_an_alpha_times_the_root_of_the_rank_is_pefts_rslora(tmp_path: Path) -> None:
    """What docs/training.md says of rank-stabilised scaling: alpha / sqrt(r) is (alpha sqrt(r)) / r."""
    oracle = peft_adapter(tmp_path, lora_alpha=6.0, use_rslora=True)
    settings = language(tmp_path, {"start": str(tmp_path / "adapter")}, alpha=6.0 * math.sqrt(2))
    host = Host(load_experiment(settings))
    host.install(host.build(host.experiment.method))
    tokens = torch.tensor([[2, 22, 9, 10, 3]])
    with host.model.active("shared"):
        torch.testing.assert_close(host.model.backbone(tokens).logits, oracle(tokens).logits, rtol=1e-4, atol=1e-5)
