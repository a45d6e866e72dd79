"""`befit eval` through lm-evaluation-harness itself, where the extra is installed, on a task of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import RunError
from befit.runs.artifacts import deployed_model
from befit.runs.harness import evaluate
from befit.runs.runner import Run
from tests.unit.runs.trained import classifier, language_model

pytest.importorskip("lm_eval")
CLIENT = "reverse.upper"
ASKED = [
    {"question": "reverse, upper: abc\n", "choices": ["CBA", "ABC", "abd"], "answer": 0},
    {"question": "reverse, upper: Nepal\n", "choices": ["NEPAL", "LAPEN", "nepal"], "answer": 1},
    {"question": "reverse, upper: word\n", "choices": ["WORD", "DROW", "word"], "answer": 2},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return language_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    (tmp_path / "mine.yaml").write_text(
        "task: mine_choices\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'asked.jsonl'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]\n'
    )
    return tmp_path


def likeliest(run: Run, method: str | None) -> list[int]:
    """The choice of the highest likelihood under the client's model, without the harness."""
    found = []
    with deployed_model(run.path, CLIENT, method) as (model, task), torch.no_grad():
        kind: Any = task
        for row in ASKED:
            scores = []
            start = kind.tokenizer(row["question"], add_special_tokens=False)["input_ids"]
            for choice in row["choices"]:
                ids = kind.tokenizer(row["question"] + choice, add_special_tokens=False)["input_ids"]
                said = model.backbone(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                scores.append(sum(float(said[at - 1, ids[at]]) for at in range(len(start), len(ids))))
            found.append(scores.index(max(scores)))
    return found


@pytest.mark.filterwarnings("ignore")  # the harness' own libraries warn of what is old in them
@pytest.mark.parametrize("method", [None, "fedit"])
def test_the_harness_asks_the_clients_own_model(llama: Run, tasks: Path, method: str | None) -> None:
    right = [said == row["answer"] for said, row in zip(likeliest(llama, method), ASKED, strict=True)]
    found = evaluate(llama.path, CLIENT, ["mine_choices"], method, include=tasks)
    assert found["mine_choices"]["acc"] == pytest.approx(sum(right) / 3)
    assert "acc_stderr" in found["mine_choices"]
    words = ["eval", str(llama.path), "--client", CLIENT, "--tasks", "mine_choices", "--include", str(tasks)]
    shown = CliRunner().invoke(app, [*words, "--limit", "2"])
    assert shown.exit_code == 0 and "mine_choices" in shown.stdout and "acc" in shown.stdout
    with pytest.raises(RunError, match="has no task mine_choice;"):
        evaluate(llama.path, CLIENT, ["mine_choice"], include=tasks)


def test_classes_are_not_for_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the task is text-classification"):
        evaluate(classifier(tmp_path).path, "a", ["mine_choices"])
