"""`digits-vqa` end to end: a model that sees is federated, answers are generated, scored and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import befit
from befit.cli.main import app
from befit.config.load import load_experiment
from befit.data.offline.digits_vqa import digits_vqa
from befit.runs.runner import check
from befit.tasks.images import read_image

CONFIGS = Path(__file__).parents[2] / "configs"


def of_rounds(rounds: int, test: int, out: Path, *shorter: str) -> befit.Run:
    short = [f"federation.rounds={rounds}", f"evaluate.every={rounds}", f"benchmark.test={test}", *shorter]
    config = load_experiment(CONFIGS / "digits-vqa-fedit.yaml", ["benchmark.clients=2", "train.lr=3e-3", *short])
    return befit.run(config, out=out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> befit.Run:
    return of_rounds(1, 2, tmp_path_factory.mktemp("digits-vqa") / "run", "baselines=[]", "report.plots=false")


@pytest.mark.slow
def test_training_raises_the_score_above_the_backbones(tmp_path: Path) -> None:
    """Of both clients, alone and together: 60 questions of four tasks each, about images that nobody trained on. When
    this was written .37 became .46 alone and .42 together."""
    from befit.config.experiment import ModelSettings
    from befit.models import load_backbone
    from befit.tasks import make_task

    run = of_rounds(3, 15, tmp_path / "run")
    backbone = load_backbone(ModelSettings("digits-llava-s"), "vqa", (), 0)
    task = make_task("vqa", backbone.processor, max_new_tokens=8)
    before = [
        task.evaluate(backbone.model, task.prepare(client.test), 60, "cpu")["vqa_score"]
        for client in digits_vqa(clients=2, test=15).clients
    ]
    assert run.results["metric"] == "vqa_score"
    for start, row in zip(before, run.results["clients"].values(), strict=True):
        assert row["examples"] == 60 and 0 <= row["exact_match"] <= 1
        assert row["baselines"]["local"] > start
    alone = [row["baselines"]["local"] for row in run.results["clients"].values()]
    assert np.mean(alone) > np.mean(before) + 0.05 and run.results["summary"]["mean"] > np.mean(before)


def test_what_travels_is_an_adapter_of_the_language_model(run: befit.Run) -> None:
    """Rank 8 in four layers: q, k, v, o (64 + 64) and gate, up, down (64 + 128), four bytes each, 1 round."""
    numbers = 4 * 8 * (4 * 128 + 3 * 192)
    for row in run.results["clients"].values():
        assert row["bytes_up"] == pytest.approx(4 * numbers, rel=0.1)
    arrays = json.loads((run.path / "outbound.json").read_text())
    assert "vision" not in json.dumps(arrays) and "projector" not in json.dumps(arrays)


def test_a_check_names_the_images_that_do_not_fit_before_anything_runs() -> None:
    config = load_experiment(CONFIGS / "digits-vqa-fedit.yaml", ["model.max_length=40"])
    with pytest.raises(befit.core.errors.DataError, match=r"client client-00, train: .*first question has .* tokens"):
        check(config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_clients_adapter_answers_from_the_command_line_as_it_does_in_peft(run: befit.Run, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from befit.zoo import zoo_path

    asked = digits_vqa(clients=2, test=15).clients[0].test[::15]  # one of each task
    lines = []
    for number, one in enumerate(asked):
        for place, image in enumerate(one["images"]):
            np.save(tmp_path / f"{number}-{place}.npy", image)
        images = [str(tmp_path / f"{number}-{place}.npy") for place in range(len(one["images"]))]
        lines.append(json.dumps({"images": images, "question": one["conversation"][0]["content"]}) + "\n")
    given = tmp_path / "questions.jsonl"
    given.write_text("".join(lines))
    shown = CliRunner().invoke(app, ["predict", str(run.path), "--client", "client-00", "--json", str(given)])
    assert shown.exit_code == 0, shown.output
    folder = zoo_path("digits-llava-s")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder), run.path / "clients" / "client-00" / "adapter"
    )
    expected = []
    for one in asked:
        text = one["conversation"][0]["content"].replace("<image>", "<image>" * 16) + "\n"
        prompt = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out: torch.Tensor = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=8,
            pixel_values=torch.stack([torch.from_numpy(read_image(image))[None] for image in one["images"]]),
        )
        expected.append(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
    assert [answer["answer"] for answer in json.loads(shown.stdout)] == expected


def test_own_files_are_trained_on_from_a_configuration(tmp_path: Path) -> None:
    """Two clients with two pictures each beside their records, in LLaVA's spelling."""
    from PIL import Image

    for client in ("north", "south"):
        folder = tmp_path / "data" / client
        folder.mkdir(parents=True)
        rows = []
        for number in range(4):
            Image.fromarray(np.full((8, 8), 40 * number, np.uint8)).save(folder / f"{number}.png")
            talk = [
                {"from": "human", "value": "<image>Even or odd? Choice list:[even, odd]"},
                {"from": "gpt", "value": ("even", "odd")[number % 2]},
            ]
            rows.append({"image": f"{number}.png", "conversations": talk})
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "data": {"task": "vqa", "clients": str(tmp_path / "data"), "val_fraction": 0},
        "model": {"id": "digits-llava-s", "max_length": 128},
        "method": {"name": "fedit", "rank": 2},
        "baselines": [],
        "train": {"max_steps": 2, "batch_size": 2},
        "federation": {"rounds": 2},
        "evaluate": {"max_new_tokens": 4, "metrics": ["vqa_score", "choice_parse"]},
        "report": {"plots": False},
    }
    done = befit.run(config, out=tmp_path / "run")
    for row in done.results["clients"].values():
        assert row["examples"] == 4 and row["vqa_score"] == row["choice_parse"]
