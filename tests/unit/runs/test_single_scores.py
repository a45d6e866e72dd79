"""The headline of every single example: kept, and what differences are paired by. In processes: test_processes.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from befit.core.storage import read_sealed
from befit.report.comparison import paired_error
from befit.runs.runner import run
from befit.tasks.base import by_value, one_by_one, take_singles

CONFIG: dict[str, Any] = {
    "benchmark": {"name": "digits", "clients": 2, "alpha": 10.0},
    "limit": {"records": 40},
    "method": "fedit",
    "baselines": ["local"],
    "train": {"max_steps": 2, "lr": 5e-3},
    "federation": {"rounds": 2},
    "report": {"plots": False},
}


def test_a_run_keeps_every_examples_score_and_pairs_differences_by_them(tmp_path: Path) -> None:
    results = run(CONFIG, out=tmp_path / "run").results
    alone = read_sealed(tmp_path / "run" / "baselines" / "local" / "method.json")
    for client, row in results["clients"].items():
        each = row["each"]
        assert isinstance(each, str) and set(each) <= set("01") and len(each) == row["examples"]
        assert statistics.fmean(map(int, each)) == pytest.approx(row["accuracy"])
        assert row["errors"] == {"local": paired_error(each, alone["clients"][client]["each"])}


def test_single_scores_stand_beside_those_by_a_field() -> None:
    right = [1.0, 0.0, 1.0]

    def measured(rows: list[int]) -> dict[str, float]:
        return {"accuracy": statistics.fmean(right[row] for row in rows)}

    values = ["de", "fr", "de"]
    metrics = {"accuracy": 2 / 3, **by_value(one_by_one(values, 3), measured)}
    assert take_singles(metrics, "accuracy") == {"accuracy": (1.0, 0.0, 1.0)}
    assert metrics == {"accuracy": 2 / 3, **by_value(values, measured)}


def test_a_headline_that_is_no_mean_over_examples_has_no_single_scores() -> None:
    metrics = {"token_accuracy": 0.9, **by_value(one_by_one([], 2), lambda rows: {"token_accuracy": float(rows[0])})}
    assert take_singles(metrics, "token_accuracy") == {} and metrics == {"token_accuracy": 0.9}
    # Not even where all examples have equally many tokens, and the mean over them is that over tokens.
    metrics = {
        "token_accuracy": 0.75,
        **by_value(one_by_one([], 2), lambda rows: {"token_accuracy": 0.5 + rows[0] / 2}),
    }
    assert take_singles(metrics, "token_accuracy") == {} and metrics == {"token_accuracy": 0.75}
