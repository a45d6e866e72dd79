"""configs/names-bert.yaml, cut short: clients and newcomers of two languages, from training to predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from befit import Run
from befit.config.load import load_experiment
from befit.runs.artifacts import predict
from befit.runs.runner import run

CONFIG = Path(__file__).parents[2] / "configs" / "names-bert.yaml"
SHORT = [
    "limit.records=20",
    "benchmark={name: names, languages: [en, zh], clients_per_language: 2}",
    "federation.rounds=2",
    "train.max_steps=2",
    "report.plots=false",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(load_experiment(CONFIG, SHORT), out=tmp_path_factory.mktemp("names") / "run")


def test_clients_and_newcomers_of_every_language_are_compared(done: Run) -> None:
    arrived = ["en-new-0", "en-new-1", "zh-new-0", "zh-new-1"]
    for section, clients in ((done.results, ["en-0", "en-1", "zh-0", "zh-1"]), (done.results["newcomers"], arrived)):
        assert list(section["clients"]) == clients
        groups = section["groups"]["language"]["groups"]
        for language, group in groups.items():
            rows = [row for client, row in section["clients"].items() if client.startswith(language)]
            right = sum(row["accuracy"] * row["examples"] for row in rows)
            assert group["scores"]["potara"]["accuracy"] == pytest.approx(right / group["examples"])
            assert group["scores"].keys() == {"local", "fedit", "potara"}
        assert list(groups) == ["en", "zh"] and sum(section["groups"]["language"]["wins"].values()) <= 2
    summary = done.results["newcomers"]["summary"]
    assert summary["scored"] == 4 and summary["download"]["scored"] == 0  # Potara's model is made at the client
    report = (done.path / "report.md").read_text()
    assert "### Language\n" in report and "### Language of newcomers\n" in report


def test_a_newcomer_predicts_in_its_own_script(done: Run) -> None:
    (answer,) = predict(done.path, "zh-new-1", ["中文"])
    assert set(answer["probabilities"]) == {"language", "territory", "currency", "script"}
