"""`befit cka`: its numbers, files and pictures, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from befit.cli.main import app
from befit.studies.cka import LayerCka
from befit.studies.cka_map import cka_csv, cka_page

MODELS = ("skills-llama", "skills-llama-s")


def call(*arguments: object, code: int = 0) -> Result:
    found = CliRunner().invoke(app, ["cka", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("public") / "records.jsonl"
    rows = [
        {"instruction": "reverse", "input": f"ab{chr(99 + n)}de", "output": f"ed{chr(99 + n)}ba"} for n in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def written(records: Path) -> Path:
    out = records.parent / "out"
    call(*MODELS, "--records", records, "--blocks", 2, "--out", out)
    return out


def test_the_files_hold_one_matrix(written: Path) -> None:
    found = json.loads((written / "cka.json").read_text())
    assert found["models"] == list(MODELS) and found["records"] == 20 and found["tokens"] == 20 * 6
    values = torch.tensor(found["cka"], dtype=torch.float64)
    assert values.shape == (5, 5) and found["rows"] == ["embedding", *(f"block {n}" for n in range(4))]
    assert bool(((values >= 0) & (values <= 1)).all())
    head, *rows = csv.reader(io.StringIO((written / "cka.csv").read_text()))
    assert head == ["layer", *found["columns"]]
    assert [[float(cell) for cell in row[1:]] for row in rows] == found["cka"]
    assert [(row["first"], row["second"]) for row in found["blocks"]] == [(1, 1), (3, 3)]
    with Image.open(written / "cka.png") as picture:
        assert picture.width > 400
    page = (written / "cka.html").read_text()
    assert "<svg" in page and "PQ-LoRA in 2 blocks" in page and "src=" not in page


def test_a_model_beside_itself_is_one_on_the_diagonal_and_json_is_all_that_is_printed(records: Path) -> None:
    found = json.loads(call(MODELS[1], MODELS[1], "--records", records, "--json").stdout)
    assert [found["cka"][n][n] for n in range(5)] == pytest.approx([1.0] * 5)
    assert len(found["blocks"]) == 4 and all(row["nearest_cka"] == pytest.approx(1.0) for row in found["blocks"])


def test_the_seed_draws_the_records(records: Path) -> None:
    few = [
        json.loads(call(*MODELS, "--records", records, "--samples", 5, "--seed", seed, "--json").stdout)["cka"]
        for seed in (0, 0, 1)
    ]
    assert few[0] == few[1] != few[2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--records, --benchmark: give one of the two"),
        (("--benchmark", "skills", "--records", "x"), "give one of the two"),
        (("--benchmark", "skills", "--tokens", "1", "--samples", "0"), "--samples: must be 1 or more, got 0"),
        (("--records", "nowhere.jsonl"), "--records: there is no file nowhere.jsonl"),
        (("--benchmark", "skills", "--blocks", "5"), "PQ-LoRA in 5 blocks: this model has 4"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(arguments: tuple[str, ...], problem: str) -> None:
    assert problem in " ".join(call(*MODELS, *arguments, code=2).output.split())


def test_names_of_models_are_text_on_the_page() -> None:
    found = LayerCka(torch.eye(3, dtype=torch.float64), ("<b>one</b>", "two"), 9, 3)
    assert "<b>one" not in cka_page(found, 2) and "&lt;b&gt;one" in cka_page(found, 1)
    assert cka_csv(found).splitlines()[1] == "embedding,1.0,0.0,0.0"


def test_a_model_for_another_task_is_told_in_befits_words(records: Path) -> None:
    found = call(MODELS[1], "digits-vit", "--records", records, code=2).output
    assert "makes no AutoModelForCausalLM of a ViTConfig" in found and "<class" not in found
