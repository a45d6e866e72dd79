"""From made-up logs of a run to its results, with numbers small enough to check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from befit.core.storage import log_line, read_lines
from befit.report.comparison import paired_error
from befit.runs.groups import at_budgets, by_group
from befit.runs.results import against_baselines, method_results, over_clients

SCORES = {("meet", 1): (0.4, 0.6), ("meet", 2): (0.5, 0.7), ("merge", 1): (0.6, 0.8)}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two rounds, in the second of which the reply of b failed, and a merge at the clients; all of them scored."""
    ledger: list[dict[str, Any]] = [
        {"stage": stage, "round": at, "client": client, "purpose": purpose, "bytes_up": up, "bytes_down": down}
        for stage, at, client, purpose, up, down in (
            ("meet", 1, "a", "train", 10, 20),
            ("meet", 1, "b", "train", 10, 20),
            ("meet", 1, "b", "score", 1, 2),
            ("meet", 2, "a", "train", 10, 20),
            ("meet", 2, "b", "failed", 10, 20),
            ("merge", 1, "a", "train", 0, 0),
            ("merge", 1, "b", "train", 0, 0),
        )
    ]
    ledger[0]["peak_memory_mib"] = 5.0
    metrics: list[dict[str, Any]] = [
        {"kind": kind, "stage": stage, "round": at, "client": client, **told}
        for (stage, at), scores in SCORES.items()
        for client, score in zip("ab", scores, strict=True)
        for kind, told in (
            ("score", {"metric": "accuracy", "value": score, "examples": 10}),
            ("each", {"values": f"{stage} {at}"}),
        )
    ]
    metrics.append({"kind": "failure", "client": "b", "stage": "meet", "round": 2, "reason": "late", "error": "Lost"})
    spent = {"seconds": 1.0, "cpu_seconds": 1.0, "peak_memory_mib": 1.0}
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(log_line({**spent, **line}) for line in ledger))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(log_line, metrics)))
    return tmp_path


def results_of(logs: Path, last: tuple[str, int], best: dict[str, int] | None = None) -> dict[str, Any]:
    return method_results(logs, ["a", "b"], {"a": 3, "b": 3}, "accuracy", ["meet", "merge"], last, {"meet"}, best)


def test_a_merge_after_the_rounds_replaces_the_last_point_of_the_curve(logs: Path) -> None:
    """What failed was sent, but is behind no point of the curve: 3 replies of 10 bytes up to the second round."""
    found = results_of(logs, ("merge", 1))
    (first, last) = found["curve"]
    assert (first["round"], first["min"], first["max"], first["bytes_up"], first["bytes_down"]) == (1, 0.4, 0.6, 20, 40)
    assert (last["round"], last["min"], last["max"], last["bytes_up"], last["bytes_down"]) == (2, 0.6, 0.8, 30, 60)
    assert found["summary"]["over_time"] == pytest.approx({"self_last": 0.7, "self_auc": 0.6})
    assert found["clients"]["a"]["over_time"] == pytest.approx({"self_last": 0.6, "self_auc": 0.5})


def test_a_clients_row_has_the_scores_of_the_end_and_what_all_of_its_rounds_cost(logs: Path) -> None:
    found = results_of(logs, ("merge", 1))
    rows = found["clients"]
    assert [(row["accuracy"], row["each"], row["updates"]) for row in rows.values()] == [
        (0.6, "merge 1", 2),
        (0.8, "merge 1", 1),
    ]
    assert [(row["bytes_up"], row["bytes_down"], row["bytes_scoring"]) for row in rows.values()] == [
        (20, 40, 0),
        (20, 40, 3),
    ]
    assert found["summary"]["bytes_up"] == 40 and found["summary"]["peak_memory_mib"] == 5.0


def test_a_client_that_was_not_scored_at_the_end_has_no_score_whatever_it_had_before(logs: Path) -> None:
    file = logs / "metrics.jsonl"
    lines = [
        line for line in read_lines(file) if (line["stage"], line["client"], line["kind"]) != ("merge", "b", "score")
    ]
    file.write_bytes(b"".join(map(log_line, lines)))
    found = results_of(logs, ("merge", 1))
    assert [row["accuracy"] for row in found["clients"].values()] == [0.6, None]
    assert found["summary"]["scored"] == 1 and found["summary"]["mean"] == 0.6


def test_of_rounds_after_the_best_one_only_the_costs_and_the_failures_stay(logs: Path) -> None:
    found = results_of(logs, ("meet", 1), {"meet": 1})
    assert [point["round"] for point in found["curve"]] == [1] and found["curve"][0]["mean"] == pytest.approx(0.7)
    assert [row["bytes_up"] for row in found["clients"].values()] == [20, 20]
    assert [(failure["round"], failure["kind"]) for failure in found["failures"]] == [(2, "Lost")]
    assert [row["each"] for row in found["clients"].values()] == ["meet 1"] * 2


def test_the_worst_of_equal_clients_is_the_first_by_name_and_one_client_has_no_spread() -> None:
    over = over_clients({"b": 0.5, "a": 0.5, "c": 0.9, "d": None})
    assert over["worst"] == {"client": "a", "value": 0.5} and over["scored"] == 3
    assert over_clients({"a": 0.5})["std"] == 0.0


def test_gains_are_over_the_best_baseline_and_over_training_alone() -> None:
    """A score of zero is one, a tie is not gained, and who has no score of both gained nothing and lost nothing."""

    def of(**scores: tuple[float | None, str]) -> dict[str, Any]:
        rows = {client: {"accuracy": value, "each": each} for client, (value, each) in scores.items()}
        return {"clients": rows, "summary": {"mean": 0.5}}

    results = of(a=(0.75, "1101"), b=(0.5, "10"), c=(0.0, "00"), d=(None, ""), e=(1.0, "1"))
    local = of(a=(0.5, "1100"), b=(0.5, "10"), c=(0.0, ""), d=(0.5, "10"), e=(None, ""))
    other = of(a=(0.25, "0001"), b=(1.0, "11"), c=(0.5, "01"), d=(0.5, "10"), e=(None, ""))
    against_baselines(results, {"local": local, "fedit": other}, "accuracy")
    rows = results["clients"]
    assert {client: row["gain"] for client, row in rows.items() if "gain" in row} == {"a": 0.25, "b": -0.5, "c": -0.5}
    alone = {client: row["gain_over_local"] for client, row in rows.items() if "gain_over_local" in row}
    assert alone == {"a": 0.25, "b": 0.0, "c": 0.0}
    assert results["summary"]["gained"] == ["a"] and results["summary"]["not_gained"] == ["b", "c"]
    assert rows["a"]["errors"] == {"local": paired_error("1101", "1100"), "fedit": paired_error("1101", "0001")}
    assert rows["c"]["errors"].keys() == {"fedit"} and "errors" not in rows["d"]
    assert results["baselines"] == {"local": {"mean": 0.5}, "fedit": {"mean": 0.5}}


def test_who_is_in_no_group_and_who_was_not_scored() -> None:
    """Of b the language is not known; c has no score of FedIT, whose mean would be of other examples without it."""
    infos = {"a": {"language": "en"}, "b": {}, "c": {"language": "en"}}
    runs = {
        "local": {"a": (0.5, 10), "b": (0.9, 10), "c": (0.25, 30)},
        "fedit": {"a": (1.0, 10), "b": (0.9, 10), "c": (None, 0)},
    }
    rows = {
        label: {client: {"accuracy": score, "examples": n} for client, (score, n) in scores.items()}
        for label, scores in runs.items()
    }
    assert by_group(rows, infos, "language", ["accuracy"])["groups"] == {
        "en": {
            "clients": 2,
            "examples": 40,
            "scores": {"local": {"accuracy": 12.5 / 40}, "fedit": {"accuracy": None}},
            "winner": None,
        }
    }


def test_a_budget_of_some_examples_alone_is_no_budget_of_the_run() -> None:
    rows = {"a": {"accuracy": 0.5, "accuracy r4 of en": 0.6}}
    assert at_budgets(rows, 2, ["accuracy"]) == {"r2": rows}
