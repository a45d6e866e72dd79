"""`skills` end to end: a language model is federated, answers are generated, scored and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import befit
from befit.cli.main import app
from befit.config.experiment import ModelSettings
from befit.config.load import load_experiment
from befit.data.offline.skills import skills
from befit.models import load_backbone
from befit.tasks import make_task

CONFIGS = Path(__file__).parents[2] / "configs"


def of_rounds(rounds: int, test: int, out: Path, *shorter: str) -> befit.Run:
    short = [
        "benchmark.clients=2",
        f"benchmark.test={test}",
        f"federation.rounds={rounds}",
        f"evaluate.every={rounds}",
        f"baselines=[{{name: local, rank: 8, alpha: 16, rounds: {rounds}}}]",
        *shorter,
    ]
    return befit.run(load_experiment(CONFIGS / "skills-fedit.yaml", short), out=out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> befit.Run:
    return of_rounds(2, 6, tmp_path_factory.mktemp("skills") / "run", "baselines=[]", "report.plots=false")


@pytest.mark.slow
def test_training_raises_the_share_of_right_answers(tmp_path: Path) -> None:
    """Against the backbone alone on the same words, for a client that trains alone for as many rounds."""
    run = of_rounds(16, 60, tmp_path / "run")
    backbone = load_backbone(ModelSettings("skills-llama"), "causal-lm", (), 0)
    task = make_task("causal-lm", backbone.processor, metrics=["exact_match"], max_new_tokens=28)
    assert run.results["metric"] == "exact_match"
    assert [client.id for client in skills(clients=2, test=60).clients] == list(run.results["clients"])
    before = [
        task.evaluate(backbone.model, task.prepare(client.test), 60, "cpu")["exact_match"]
        for client in skills(clients=2, test=60).clients
    ]
    rows = run.results["clients"].values()
    assert all(row["examples"] == 60 and 0 <= row["exact_match"] <= row["rougeL_char"] <= 1 for row in rows)
    gains = [row["baselines"]["local"] - start for row, start in zip(rows, before, strict=True)]
    assert sum(gains) / 2 > 0.2


def test_what_travels_is_the_size_of_the_adapters(run: befit.Run) -> None:
    """18,432 numbers of four bytes: four layers of q, k and v, rank 8 between 96 and 96; 2 rounds each way."""
    for row in run.results["clients"].values():
        assert row["bytes_up"] == pytest.approx(2 * 18_432 * 4, rel=0.1)


def test_the_report_names_the_metric_and_the_clients(run: befit.Run) -> None:
    text = (run.path / "report.md").read_text()
    assert "exact match" in text and "reverse.upper" in text


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_clients_adapter_answers_from_the_command_line_as_it_does_in_peft(run: befit.Run, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from befit.zoo import zoo_path

    given = tmp_path / "words.jsonl"
    given.write_text(json.dumps({"instruction": "reverse, upper", "input": "Nepali"}) + "\n")
    shown = CliRunner().invoke(app, ["predict", str(run.path), "--client", "reverse.upper", "--json", str(given)])
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    folder = zoo_path("skills-llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), run.path / "clients" / "reverse.upper" / "adapter"
    )
    prompt = torch.tensor([tokenizer("reverse, upper: Nepali\n")["input_ids"]])
    out: torch.Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=28
    )
    assert json.dumps(answer).count(json.dumps(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)))
