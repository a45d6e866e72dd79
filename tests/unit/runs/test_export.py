"""What is exported loads in PEFT and transformers and says the same; cuts are best; what no server takes is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import RunError
from befit.runs.artifacts import copy_beside_weights, predict, read_deployment
from befit.runs.exporting import ExportForm, export, export_all, export_to, serving_command
from befit.runs.peft_io import cut_ranks
from befit.runs.runner import Run
from befit.zoo import zoo_path
from tests.unit.runs.trained import ROWS, classifier, language_model

# PEFT asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LLAMA = zoo_path("skills-llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return classifier(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return language_model(tmp_path_factory.mktemp("llama"))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 43).view(2, 20)).logits


def with_peft(folder: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(LLAMA), folder)


def updates(model: Any) -> dict[str, Tensor]:
    """What PEFT adds to each weight, (d_out, d_in)."""
    return {
        name: module.get_delta_weight("default").double()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@pytest.mark.parametrize(("method", "rank"), [(None, 3), ("fedit", 2)])
def test_a_cut_is_the_best_of_its_rank_and_says_what_is_left(
    llama: Run, tmp_path: Path, method: str | None, rank: int
) -> None:
    whole, cut = (
        with_peft(export(llama.path, "reverse.upper", tmp_path / str(ranks), method=method, rank=ranks))
        for ranks in (None, rank)
    )
    config = json.loads((tmp_path / str(rank) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (rank, rank, {})
    kept, total = 0.0, 0.0
    for name, full in updates(whole).items():
        u, sigma, vh = torch.linalg.svd(full)
        best = (u[:, :rank] * sigma[:rank]) @ vh[:rank]
        torch.testing.assert_close(updates(cut)[name], best, atol=1e-6, rtol=1e-4)
        kept, total = kept + float((sigma[:rank] ** 2).sum()), total + float((sigma**2).sum())
    (done,) = export_to(llama.path, {"reverse.upper": tmp_path / "again"}, ExportForm(method, rank=rank))
    assert done.energy == pytest.approx(kept / total, abs=1e-6) and 0.5 < done.energy < 1


def test_scales_and_ranks_of_single_modules_are_in_a_cut() -> None:
    draw = torch.Generator().manual_seed(0)
    B, A = torch.randn(6, 3, generator=draw), torch.randn(3, 5, generator=draw)
    stem = "base_model.model.m"
    tensors = {f"{stem}.lora_A.weight": A, f"{stem}.lora_B.weight": B, f"{stem}.lora_B.bias": torch.ones(6)}
    config = {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"m": 3}, "alpha_pattern": {"m": 5}}
    scale = 5 / 3**0.5
    for rank in (2, 4):
        cut, entries, energy = cut_ranks(tensors, config, rank)
        u, sigma, vh = torch.linalg.svd(scale * (B @ A))
        best = (u[:, :rank] * sigma[:rank]) @ vh[:rank]
        torch.testing.assert_close(cut[f"{stem}.lora_B.weight"] @ cut[f"{stem}.lora_A.weight"], best)
        torch.testing.assert_close(cut[f"{stem}.lora_B.bias"], torch.full((6,), scale))
        assert (entries["r"], entries["lora_alpha"], entries["use_rslora"]) == (rank, rank, False)
        assert entries["rank_pattern"] == entries["alpha_pattern"] == ({} if rank == 2 else {"m": 3})
        assert energy == pytest.approx(float((sigma[:rank] ** 2).sum() / (sigma**2).sum()))


def test_scores_stand_beside_a_cut(llama: Run, tmp_path: Path) -> None:
    (done,) = export_to(llama.path, {"reverse.upper": tmp_path / "again"}, ExportForm(rank=3))
    assert done.rank == 3 and done.score == llama.results["clients"]["reverse.upper"]["token_accuracy"]
    (high,) = export_to(llama.path, {"reverse.upper": tmp_path / "high"}, ExportForm(rank=90))
    assert high.energy == pytest.approx(1, abs=1e-9) and high.cut == pytest.approx(high.score, abs=1e-6)
    assert done.cut is not None and f"is then {done.cut:.3f}" in (tmp_path / "again" / "README.md").read_text()


def test_what_peft_reads_is_the_clients_own_model(llama: Run, tmp_path: Path) -> None:
    """Against the deployment's own arrays: the folded rounds as one matrix, and the last adapter on top."""
    model = with_peft(export(llama.path, "reverse.upper", tmp_path / "a"))
    arrays = read_deployment(llama.path / "clients" / "reverse.upper").arrays
    for name, delta in updates(model).items():
        block, leaf = name.split("layers.")[1].split(".")[0], name.split(".")[-1]
        key = f"block.{int(block):02d}.{leaf}"
        own = arrays[f"personal/{key}/B"] @ arrays[f"personal/{key}/A"] * 8
        torch.testing.assert_close(delta.float(), arrays[f"base/{key}/weight"] + own, atol=1e-6, rtol=1e-4)


def test_a_merged_model_needs_no_peft(llama: Run, tmp_path: Path) -> None:
    adapter, model = export(llama.path, "reverse.upper", tmp_path / "a"), tmp_path / "m"
    export(llama.path, "reverse.upper", model, merged=True)
    expected = logits(with_peft(adapter))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(model)), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(LLAMA)), atol=1e-2)
    assert (
        AutoTokenizer.from_pretrained(model)("ab")["input_ids"]
        == AutoTokenizer.from_pretrained(LLAMA)("ab")["input_ids"]
    )
    whole = export_to(llama.path, {"reverse.upper": tmp_path / "again"}, ExportForm(merged=True))
    assert serving_command(tmp_path, whole) is None and whole[0].rank is None
    assert {file.name for file in model.iterdir()} == {
        *(file.name for file in LLAMA.iterdir() if file.name != "README.md"),
        "README.md",
    }
    assert not list(model.glob("adapter*")) and "library_name: transformers" in (model / "README.md").read_text()


def test_an_output_embedding_that_is_the_inputs_too_is_merged_by_itself(tmp_path: Path) -> None:
    targets = {"adapter": {"targets": ["q_proj", "lm_head"]}, "method": "fedit", "baselines": []}
    path = language_model(tmp_path, **targets).path
    adapter, model = (export(path, "reverse.upper", tmp_path / name, merged=name == "m") for name in ("a", "m"))
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        expected = logits(with_peft(adapter))
    merged = AutoModelForCausalLM.from_pretrained(model)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    bare = AutoModelForCausalLM.from_pretrained(LLAMA)
    assert bare.config.tie_word_embeddings and not merged.config.tie_word_embeddings
    assert torch.equal(merged.get_input_embeddings().weight, bare.get_input_embeddings().weight)


def test_a_backbone_that_has_changed_since_is_refused(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "model")
    path = language_model(tmp_path, model={"id": str(tmp_path / "model")}, method="fedit", baselines=[]).path
    export(path, "reverse.upper", tmp_path / "before", merged=True)
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: value + 0.1 for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(RunError, match=r"model is not the one that .* was trained on"):
        export(path, "reverse.upper", tmp_path / "after", merged=True)


def test_what_lies_beside_a_model_and_is_not_needed_stays_there(tmp_path: Path) -> None:
    needed = ["config.json", "tokenizer.json", "special_tokens_map.json", "spiece.model", "vocab.txt", "LICENSE.txt"]
    other = ["modules.json", "train_script.py", "data_config.json", "picture.png", "pytorch_model.bin", "README.md"]
    for folder in ("out", "base"):
        (tmp_path / folder).mkdir()
    for name in (*needed, *other):
        (tmp_path / "base" / name).write_text(name)
    copy_beside_weights(tmp_path / "base", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(needed)


def test_a_link_out_of_an_adapter_is_not_followed(llama: Run, tmp_path: Path) -> None:
    """A run that somebody passed on could bring a file of this machine into what is passed on next."""
    passed_on = tmp_path / "run"
    shutil.copytree(llama.path, passed_on)
    client = sorted(llama.results["clients"])[0]
    (tmp_path / "secret.txt").write_text("secret")
    (passed_on / "clients" / client / "adapter" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(RunError, match=r"notes\.txt is a link to .*secret\.txt, which is no part of the run"):
        export_to(passed_on, {client: tmp_path / "exported"}, ExportForm())
    assert not (tmp_path / "exported" / "notes.txt").exists()


def test_everybody_is_written_as_servers_look_for_it(llama: Run, tmp_path: Path) -> None:
    done = export_all(llama.path, tmp_path / "all", ExportForm(base="owner/skills", rank=12))
    clients, newcomers = llama.results["clients"], llama.results["newcomers"]["clients"]
    assert [one.client for one in done] == [*clients, *newcomers] and not any(one.limits for one in done[:2])
    assert all(one.path is None and "has no adapter" in one.limits[0] for one in done[2:])  # ReLoRA has none for them
    for client in clients:
        config = json.loads((tmp_path / "all" / client / "adapter_config.json").read_text())
        # What vLLM's helper reads of it: no head, no bias, a rank that --max-lora-rank may be at least.
        assert config["base_model_name_or_path"] == "owner/skills" and config["modules_to_save"] is None
        assert config["bias"] == "none" and config["r"] == 12 and not config.get("use_dora")
        assert 'base_model: "owner/skills"' in (tmp_path / "all" / client / "README.md").read_text()
    command = serving_command(tmp_path / "all", done)
    assert command is not None and command.endswith("vllm serve owner/skills --enable-lora --max-lora-rank 16")
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "all"))):
        export_all(llama.path, tmp_path / "all", ExportForm())
    full = export_all(llama.path, tmp_path / "full", ExportForm())
    assert full[0].rank and full[0].rank > 90
    assert full[0].limits == ("its backbone is called skills-llama: give the name it is served by as --base",)


def test_a_classifier_is_named_as_what_no_server_takes_and_merges_with_its_head(texts: Run, tmp_path: Path) -> None:
    words = [row["review"] for row in ROWS]
    done = export_all(texts.path, tmp_path / "all", ExportForm())
    assert all("(classifier)" in one.limits[0] for one in done)
    assert serving_command(tmp_path / "all", done) is None
    for method in (None, "local"):
        folder = export(texts.path, "b", tmp_path / f"merged {method}", method=method, merged=True)
        model, tokenizer = (
            AutoModelForSequenceClassification.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        with torch.no_grad():
            said = model.eval()(**tokenizer(words, return_tensors="pt", padding=True)).logits.softmax(-1)
        expected = [list(one["probabilities"].values()) for one in predict(texts, "b", words, method)]
        torch.testing.assert_close(said, torch.tensor(expected), atol=1e-5, rtol=1e-4)
        assert model.config.id2label == {0: "bad", 1: "good"}
    local = export(texts.path, "b", tmp_path / "local", method="local")
    source = texts.path / "baselines" / "local" / "clients" / "b" / "adapter" / "adapter_model.safetensors"
    assert load_file(local / source.name).keys() == load_file(source).keys()
    assert (local / source.name).read_bytes() == source.read_bytes()


def test_the_command_prints_scores_limits_and_how_to_serve(llama: Run, texts: Run, tmp_path: Path) -> None:
    def call(*words: str | Path) -> Any:
        return CliRunner().invoke(app, ["export", *map(str, words)])

    shown = call(llama.path, "--all", "--rank", 8, "--base", "owner/x", "--out", tmp_path / "a")
    assert shown.exit_code == 0, shown.stderr
    assert "norm² left" in shown.stdout and "reverse.upper" in shown.stdout and "serve with" in shown.stdout
    told = json.loads(call(texts.path, "--client", "a", "--out", tmp_path / "b", "--json").stdout)
    assert told["path"] == str(tmp_path / "b") and told["serve"] is None and told["limits"]
    for words in ((), ("--all", "--client", "a")):
        refused = call(texts.path, *words, "--out", tmp_path / "c")
        assert refused.exit_code == 2 and "--client ID or --all" in refused.stderr


def test_a_card_says_data_score_and_licence(texts: Run, llama: Run, tmp_path: Path) -> None:
    row = texts.results["clients"]["a"]
    card = (export(texts, "a", tmp_path / "a") / "README.md").read_text()
    assert f"Trained on {row['train_examples']} examples" in card and "licence is not known here" in card
    assert f"Its accuracy is {row['accuracy']:.3f} on this client's own {row['examples']} test examples" in card
    (texts.path.parent / "bert" / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    card = (export(texts.path, "a", tmp_path / "b") / "README.md").read_text()
    assert "licence is mit" in card and "license: mit\n" in card
    assert "license: apache-2.0" in (export(llama.path, "reverse.upper", tmp_path / "c") / "README.md").read_text()
