"""Scores of classes by hand, and what a run keeps of them: confusions, the most frequent class, means by examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from befit.core.errors import DataError
from befit.core.metrics import CLASS_METRICS
from befit.report.headline import headline_sentences
from befit.report.page import _figures, render_page
from befit.report.record import read_record
from befit.runs.results import over_clients
from befit.runs.runner import run
from befit.tasks import make_task
from befit.tasks.class_metrics import class_scores, majority_score
from befit.tasks.images import ImagePreprocessor
from tests.tiny import CLASSES, tiny_examples, tiny_model, tiny_task

LABELS = np.array([0, 0, 0, 1, 2, 2])
SAID = np.array([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.1, 0.3, 0.6], [0.5, 0.1, 0.4]])


def test_every_score_is_what_it_is_by_hand() -> None:
    scores = class_scores(LABELS, SAID.argmax(1), SAID, CLASS_METRICS)
    assert list(scores) == list(CLASS_METRICS)
    assert scores["accuracy"] == 4 / 6
    assert scores["balanced_accuracy"] == pytest.approx((2 / 3 + 1 + 1 / 2) / 3)
    # F1 = 2 right / (examples of the class + answers of it)
    assert scores["macro_f1"] == pytest.approx((2 * 2 / (3 + 3) + 2 * 1 / (1 + 2) + 2 * 1 / (2 + 1)) / 3)
    # of all pairs of an example of the class and one of another, the share in which the class is likelier for the first
    pairs = [(SAID[c == LABELS, c][:, None], SAID[c != LABELS, c][None, :]) for c in range(3)]
    by_pairs = [float(((mine > other) + 0.5 * (mine == other)).mean()) for mine, other in pairs]
    assert scores["auroc"] == pytest.approx(sum(by_pairs) / 3)
    # bins of 1/15: 0.5 alone (wrong), 0.6 three times (right), 0.7 (wrong), 0.8 (right)
    gaps = [abs(0 - 0.5), 3 * abs(1 - 0.6), abs(0 - 0.7), abs(1 - 0.8)]
    assert scores["calibration_error"] == pytest.approx(sum(gaps) / 6)


def test_one_class_has_no_ranking_and_the_most_frequent_class_scores_by_the_metric_itself() -> None:
    assert class_scores(np.zeros(3, int), SAID[:3].argmax(1), SAID[:3], ["auroc", "accuracy"]).keys() == {"accuracy"}
    assert majority_score([0, 1, 1], [0, 0, 1], 2, "accuracy") == pytest.approx(1 / 3)
    assert majority_score([0, 1, 1], [0, 0, 1], 2, "balanced_accuracy") == 0.5
    assert majority_score([0, 1, 1], [0, 0, 1], 2, "auroc") == 0.5
    assert majority_score([], [0], 2, "accuracy") is None


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_a_task_measures_what_it_is_asked_and_its_default_stays(kind: str) -> None:
    model, examples, task = tiny_model(kind), tiny_examples(kind, 40), tiny_task(kind)
    usual = task.evaluate(model, examples, 16, "cpu")
    assert list(usual) == ["accuracy", "loss"]
    asked: Any = type(task)(
        getattr(task, "tokenizer", getattr(task, "preprocessor", None)),
        task.label_names,
        metrics=CLASS_METRICS[::-1][1:],
    )
    scores = asked.evaluate(model, examples, 16, "cpu", ["a", "b"] * 19 + ["c", "a"])
    assert scores["accuracy"] == usual["accuracy"] and scores["loss"] == usual["loss"]
    assert {"auroc of a", "macro_f1 of b", "examples of a"} <= scores.keys()
    assert [name for name in scores if name.endswith(" of c")] == [
        f"{name} of c" for name in ("examples", "macro_f1", "balanced_accuracy", "accuracy")
    ]


def test_a_headline_that_does_not_exist_is_an_error() -> None:
    task = make_task("image-classification", ImagePreprocessor(1, 4, 4), CLASSES, metrics=["auroc"])
    examples = tiny_examples("vit", 4)
    examples.columns["labels"][:] = 1  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"auroc .* all 4 examples"):
        task.evaluate(tiny_model("vit"), examples, 4, "cpu")


def test_a_run_has_confusions_the_most_frequent_class_and_means_by_examples(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 1.0},
        "method": "fedit",
        "baselines": ["local"],
        "train": {"max_steps": 2, "lr": 5e-3},
        "federation": {"rounds": 2},
        "report": {"plots": False},
    }
    plain = run(config, out=tmp_path / "run")
    rows, summary = plain.results["clients"], plain.results["summary"]
    for row in rows.values():
        right = sum(answers.get(label, 0) for label, answers in row["confusion"].items())
        assert sum(sum(answers.values()) for answers in row["confusion"].values()) == row["examples"]
        assert right / row["examples"] == pytest.approx(row["accuracy"])
        assert 0 < row["majority"] < 1
    total = sum(row["examples"] for row in rows.values())
    assert summary["weighted_mean"] == pytest.approx(
        sum(row["accuracy"] * row["examples"] for row in rows.values()) / total
    )
    assert summary["majority"]["mean"] == pytest.approx(sum(row["majority"] for row in rows.values()) / 3)
    page = render_page(read_record(plain.path), plots=False)
    assert "most frequent class" in page and "weighted by examples" in page
    wanted = {**config, "evaluate": {"metrics": ["macro_f1", "accuracy"]}}
    asked = run(wanted, out=tmp_path / "asked").results
    assert asked["metric"] == "macro_f1" and asked["metrics"] == ["macro_f1", "accuracy"]
    page = render_page(read_record(tmp_path / "asked"), plots=False)
    assert "All metrics of FedIT" in page and "macro f1" in page and "Most frequent confusions" in page
    for client, row in asked["clients"].items():
        assert row["accuracy"] == rows[client]["accuracy"] and 0 < row["macro_f1"] < 1 and "each" not in row


def test_a_mean_over_all_examples_stands_beside_that_over_clients() -> None:
    over = over_clients({"a": 1.0, "b": 0.5, "c": None}, {"a": 2, "b": 8, "c": 5})
    assert over["mean"] == 0.75 and over["weighted_mean"] == pytest.approx(0.6)
    assert "weighted_mean" not in over_clients({"a": 1.0})


def test_a_site_with_two_test_examples_does_not_rule_the_headline() -> None:
    """Three hospitals: the mean gain is one example of the third."""
    scores = {"north": (67, 0.925, 0.940), "south": (80, 0.813, 0.850), "islet": (2, 0.5, 1.0)}
    results: Any = {
        "method": "fedit",
        "metric": "accuracy",
        "split": "test",
        "clients": {
            client: {"examples": count, "accuracy": mine, "baselines": {"local": alone}}
            for client, (count, alone, mine) in scores.items()
        },
        "summary": {"mean": 0.93},
        "baselines": {"local": {"mean": 0.746}},
    }
    said = [line for line in headline_sentences(results) if "islet has only" in line]
    gain = 100 * sum(count * (mine - alone) for count, alone, mine in scores.values()) / 149
    assert said == [
        "islet has only 2 test examples: weighted by their number of examples the gain over training alone is "
        f"+{gain:.1f} points."
    ]
    assert math.isclose(gain, 3.3, abs_tol=0.05)
    results["summary"]["weighted_mean"] = 0.892
    assert ("89.2%", "weighted by examples") in _figures(results)
    results["clients"]["islet"]["examples"] = 20
    assert not [line for line in headline_sentences(results) if "has only" in line]
    assert "weighted by examples" not in {name for _, name in _figures(results)}
