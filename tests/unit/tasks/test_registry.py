"""A task of a user's own: everything that befit knows of it stands in one file."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import befit
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.runs.artifacts import predict
from befit.runs.exporting import export
from befit.runs.host import Host
from befit.runs.runner import check
from befit.tasks import get_task, make_task, register_task, registry, task_names
from tests.tiny import tiny_task

STARS = '''
"""Reviews with one to three stars, scored by how near the answer comes."""

import torch

import befit
from befit.tasks import batches, inference


@befit.register_task(
    "stars",
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    fields=("review", "label"),
)
class Stars(befit.tasks.TextClassification):
    name = "stars"
    metric = "closeness"

    def encode(self, records):
        return super().encode([{**record, "text": record["review"]} for record in records])

    def as_record(self, value):
        return {"review": value} if isinstance(value, str) else value

    def evaluate(self, model, examples, batch_size, device, values=()):
        """1 for the right number of stars, 0 for the farthest from it."""
        total = 0.0
        with inference(model):
            for _, batch in batches(examples, batch_size, device):
                gap = (self.logits(model, batch).argmax(-1) - batch["labels"]).abs()
                total += float((1 - gap / (len(self.label_names) - 1)).sum())
        return {"closeness": total / len(examples)}
'''


@pytest.fixture
def stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file above, imported; the registry is as it was afterwards."""
    monkeypatch.setattr(registry, "TASKS", copy.copy(registry.TASKS))
    file = tmp_path / "stars.py"
    file.write_text(STARS)
    spec = importlib.util.spec_from_file_location("stars", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield file


def values(folder: Path) -> dict[str, object]:
    for client, text in (("a", "anna"), ("b", "boris")):
        folder.mkdir(exist_ok=True)
        rows = [{"words": f"{text}{row}", "label": str(1 + row % 3)} for row in range(24)]
        (folder / f"{client}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "name": "stars",
        "model": {"id": "names-bert-fl", "device": "cpu"},
        "data": {"clients": str(folder), "task": "stars", "columns": {"review": "words"}},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 1, "batch_size": 4},
        "federation": {"rounds": 1},
    }


def test_a_fifth_task_is_one_file(stars: Path, tmp_path: Path):
    """Own field, metric and record: read, checked, trained, scored, exported and predicted with."""
    experiment = load_experiment(values(tmp_path / "data"))
    assert check(experiment)["clients"]
    done = befit.run(experiment, out=tmp_path / "run")
    mine = next(iter(done.results["clients"].values()))
    assert 0 <= mine["closeness"] <= 1
    folder = export(tmp_path / "run", "a", tmp_path / "peft")
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    (answer,) = predict(tmp_path / "run", "a", [{"words": "anna1"}])
    assert answer["answer"] in ("1", "2", "3")


def test_a_task_that_does_not_return_its_metric_is_named_with_what_it_returns(
    stars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    host = Host(load_experiment(values(tmp_path / "data")))
    monkeypatch.setattr(type(host.task), "evaluate", lambda *_, **__: {"nearness": 0.5})
    done = befit.run(host.experiment, out=tmp_path / "run", host=host)
    reasons = {failure["reason"] for failure in done.results["failures"]}
    assert reasons == {"Stars.evaluate returned no closeness, which it is to measure; it returned nearness"}


def test_columns_of_a_task_are_its_own(stars: Path, tmp_path: Path):
    wrong = values(tmp_path / "data")
    wrong["data"] = {**wrong["data"], "columns": {"text": "words"}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"data\.columns\.text: .*review, label"):
        befit.run(load_experiment(wrong), out=tmp_path / "run")


def test_two_tasks_cannot_share_a_name():
    with pytest.raises(ValueError, match="two tasks are called 'vqa'"):
        register_task("vqa", auto_class="AutoModel")(lambda processor: None)  # type: ignore[arg-type,return-value]


def test_the_names_follow_from_the_registry(stars: Path):
    assert task_names() == ["text-classification", "image-classification", "causal-lm", "preference", "vqa", "stars"]
    assert task_names(writes_text=True) == ["causal-lm", "preference", "vqa"]
    assert get_task("stars").settings == ("label_names", "max_length", "metrics")


def test_a_headline_of_several_words_is_refused(stars: Path) -> None:
    """Names of scores are told apart by their spaces: `closeness r4 of group`."""
    text = stars.read_text().replace('"closeness"', '"close by"')
    namespace: dict[str, object] = {"__name__": "stars"}
    exec(compile(text, str(stars), "exec"), namespace)
    with pytest.raises(ConfigError, match=r"metric: .*'close by'"):
        make_task("stars", vars(tiny_task("bert"))["tokenizer"], ("a", "b"))
