"""Scores by group and wins, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from befit.core.metrics import group_keys
from befit.report.groups import group_tables
from befit.report.numbers import NOTHING
from befit.report.table import markdown
from befit.runs.groups import by_group, winner

INFOS = {"a": {"language": "en"}, "b": {"language": "en"}, "c": {"language": "zh"}}


def rows(a: float | None, b: float, c: float) -> dict[str, dict[str, Any]]:
    values = {"a": (a, 10), "b": (b, 30), "c": (c, 20)}
    return {client: {"accuracy": value, "examples": count} for client, (value, count) in values.items()}


def test_a_groups_score_is_over_its_examples_and_not_over_its_clients() -> None:
    """(10 * 0.8 + 30 * 0.4) / 40 = 0.5, where the mean over clients is 0.6; 0.45 for the other run."""
    runs = {"local": rows(0.8, 0.4, 0.7), "fedit": rows(0.6, 0.4, 0.7)}
    found = by_group(runs, INFOS, "language", ["accuracy"])
    english, chinese = found["groups"].values()
    assert english["scores"]["local"]["accuracy"] == pytest.approx(0.5)
    assert english["scores"]["fedit"]["accuracy"] == pytest.approx(0.45)
    assert (english["clients"], english["examples"], english["winner"]) == (2, 40, "local")
    assert chinese["winner"] is None and found["wins"] == {"local": 1, "fedit": 0}


def test_a_group_in_which_a_run_has_no_score_of_a_client_has_none_of_that_run() -> None:
    runs = {"local": rows(None, 0.4, 0.7), "fedit": rows(0.6, 0.4, 0.6), "potara": rows(0.5, 0.4, 0.5)}
    found = by_group(runs, INFOS, "language", ["accuracy"])
    assert found["groups"]["en"]["scores"]["local"]["accuracy"] is None
    assert found["groups"]["en"]["winner"] == "fedit" and found["groups"]["zh"]["winner"] == "local"


@pytest.mark.parametrize(
    ("first", "second", "third", "expected"),
    [
        ((0.3, 0.3, 0.1), (0.2, 0.2, 0.2), (0.1, 0.1, 0.1), "first"),
        ((0.3, 0.2, 0.1), (0.2, 0.3, 0.1), (0.1, 0.1, 0.2), None),
        ((0.3, 0.2, 0.1), (0.2, 0.2, 0.1), (0.1, 0.1, 0.1), None),
        ((0.3, 0.30000001, 0.1), (0.2, 0.3, 0.9), (0.1, 0.1, 0.1), "first"),
    ],
)
def test_a_win_of_generated_text_takes_two_of_three_metrics_strictly(
    first: tuple[float, ...], second: tuple[float, ...], third: tuple[float, ...], expected: str | None
) -> None:
    metrics = ["meteor_exact_stem", "rouge1", "rougeL"]
    scores = {
        name: dict(zip(metrics, values, strict=True))
        for name, values in (("first", first), ("second", second), ("third", third))
    }
    assert winner(scores, metrics) == expected


def test_metrics_that_count_in_no_win_are_scored_all_the_same() -> None:
    """Two of three for the first; with rougeL_unicode as a fourth it would have two of four, and none for anybody."""
    metrics = ["rougeL", "rouge1", "rougeL_unicode", "meteor_exact_stem"]
    values = {"local": (0.3, 0.1, 0.1, 0.3), "fedit": (0.2, 0.2, 0.2, 0.2)}
    runs = {
        label: {client: {**dict(zip(metrics, of, strict=True)), "examples": 5} for client in INFOS}
        for label, of in values.items()
    }
    assert by_group(runs, INFOS, "language", metrics)["wins"] == {"local": 0, "fedit": 0}
    counted = ["meteor_exact_stem", "rouge1", "rougeL"]
    found = by_group(runs, INFOS, "language", metrics, counted)
    assert found["wins"] == {"local": len(found["groups"]), "fedit": 0} and found["metrics"] == counted
    assert found["groups"]["en"]["scores"]["local"]["rougeL_unicode"] == pytest.approx(0.1)


def test_a_run_wins_nothing_alone_or_against_runs_without_scores() -> None:
    assert winner({"a": {"m": 0.9}}, ["m"]) is None
    assert winner({"a": {"m": 0.9}, "b": {"m": None}}, ["m"]) is None


def test_clients_are_grouped_by_what_some_share_and_some_do_not() -> None:
    assert group_keys(
        {"a": {"x": "1", "y": "1", "z": "1"}, "b": {"x": "1", "y": "2", "z": "2"}, "c": {"x": "1", "y": "3", "z": "2"}}
    ) == ["z"]
    assert group_keys({"a": {}, "b": {}}) == []


def test_the_table_marks_the_best_and_counts_wins() -> None:
    runs = {"local": rows(0.8, 0.4, 0.7), "fedit": rows(0.6, 0.4, 0.7)}
    results = {"metric": "accuracy", "groups": {"language": by_group(runs, INFOS, "language", ["accuracy"])}}
    (table,) = group_tables(results)
    assert table.title == "Language" and table.note == "Best in 2 groups: Local in 1, FedIT in 0, nobody in 1."
    assert "| en | 2 | 40 | 50.0% | 45.0% | Local |" in markdown(table)


def test_a_run_that_was_not_measured_is_no_loser() -> None:
    """At en the third run lacks a client, and at zh nothing was measured but one run."""
    runs = {"local": rows(0.8, 0.4, 0.7), "fedit": rows(0.6, 0.4, 0.7), "potara": rows(None, 0.4, 0.9)}
    for label in ("local", "fedit"):
        runs[label]["c"]["accuracy"] = None
    one = by_group(runs, INFOS, "language", ["accuracy"])
    (table,) = group_tables({"metric": "accuracy", "groups": {"language": one}})
    assert table.note == (
        "Best in 1 group: Local in 1 (measured in 1), FedIT in 0 (measured in 1), Potara in 0 (measured in "
        "1). 1 group with fewer than two measured runs is left out."
    )
    runs["potara"] = {client: {**row, "accuracy": None} for client, row in runs["potara"].items()}
    one = by_group(runs, INFOS, "language", ["accuracy"])
    (table,) = group_tables({"metric": "accuracy", "groups": {"language": one}})
    assert table.note.endswith("Not measured here: Potara.") and table.texts[-1][-4:] == ["1", "0", NOTHING, ""]
