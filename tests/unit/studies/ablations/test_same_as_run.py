"""Ablations measure the run itself: the same branches, the same weights, the same scores, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from befit.core.storage import read_json
from befit.studies.ablations.measure import FinishedAblation, ablate
from befit.studies.compare.comparison import compare
from tests.unit.studies.ablations.conftest import CONFIG

LITTLE_DATA = {"limit": {"clients": 2, "records": 20}}  # for what is about files and not about numbers


def by_client(done: FinishedAblation, **values: Any) -> dict[str, dict[str, Any]]:
    rows = [row for row in done.results["rows"] if all(row[key] == value for key, value in values.items())]
    return {row["client"]: row for row in rows}


def test_the_computed_weight_and_its_score_are_those_of_a_run(
    sweep: FinishedAblation, run_results: dict[str, Any]
) -> None:
    rows = by_client(sweep, computed=True)
    assert rows.keys() == run_results["clients"].keys()
    for client, row in run_results["clients"].items():
        assert rows[client]["w"] == row["diagnostics"]["w"]
        assert rows[client]["score"] == row["accuracy"]
        assert rows[client]["trace"] == pytest.approx(row["diagnostics"]["trace_merged"], rel=1e-12)


def test_the_ends_of_the_sweep_are_local_training_and_fedit(
    sweep: FinishedAblation, run_results: dict[str, Any]
) -> None:
    for w, label in ((0.0, "local"), (1.0, "fedit")):
        rows = by_client(sweep, computed=False, w=w)
        assert {client: row["score"] for client, row in rows.items()} == {
            client: row["baselines"][label] for client, row in run_results["clients"].items()
        }


def test_checkpoints_are_those_of_one_fedit_run_and_bytes_are_counted(
    sweep: FinishedAblation, root: Path, run_results: dict[str, Any]
) -> None:
    done = ablate("potara-rounds", CONFIG, out=root)
    curve = {point["round"]: point["mean"] for point in run_results["curves"]["fedit"]}
    for round_ in (1, 2, 3):
        rows = by_client(done, round=round_).values()
        assert sum(row["federated"] for row in rows) / 3 == pytest.approx(curve[round_], abs=1e-12)
        for row in rows:
            assert row["bytes_up"] * 3 == run_results["clients"][row["client"]]["bytes_up"] * round_
    last = by_client(done, round=3)
    assert {c: row["merged"] for c, row in last.items()} == {
        c: r["accuracy"] for c, r in run_results["clients"].items()
    }
    assert len({row["local"] for row in done.results["rows"] if row["client"] == "client-00"}) == 1


def trained(events: list[dict[str, Any]]) -> set[str]:
    """The stages in which clients worked."""
    return {event["stage"] for event in events if event["kind"] == "client"}


def test_a_later_ablation_trains_nothing_and_measures_the_same(sweep: FinishedAblation, root: Path) -> None:
    shared = root / "shared"
    assert len(list(shared.iterdir())) == 2, "one folder for each branch"
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    events: list[dict[str, Any]] = []
    config = {
        **CONFIG,
        "method": {**CONFIG["method"], "statistics": {"samples": 5, "split": "val"}, "merge_space": "product"},
    }
    other = ablate("potara-weight-sweep", config, out=root, options={"step": 1.0}, observer=events.append)
    assert trained(events) == {"measure"}
    for w in (0.0, 1.0):  # other statistics and another space, but the same two adapters
        scores = [{c: r["score"] for c, r in by_client(one, computed=False, w=w).items()} for one in (sweep, other)]
        assert scores[0] == scores[1]
    events.clear()
    ablate("potara-merge-space", CONFIG, out=root, observer=events.append)
    assert trained(events) <= {"merge"}, "both branches are taken over"
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*")} == before
    again = ablate("potara-weight-sweep", CONFIG, out=root, options={"step": 0.5})
    assert again.results["rows"] == sweep.results["rows"]
    assert read_json(again.path / "ablation.json")["rows"] == sweep.results["rows"]


def test_what_changes_the_branches_trains_others(tmp_path: Path) -> None:
    short = {**CONFIG, **LITTLE_DATA, "federation": {"rounds": 1}, "method": {**CONFIG["method"], "rounds_local": 1}}
    changes: list[dict[str, Any]] = [
        {},
        {"train": {"max_steps": 2, "lr": 2e-3}},
        {"method": {**CONFIG["method"], "rank": 3}},
    ]
    for count, change in enumerate(changes, start=1):
        ablate("potara-weight-sweep", {**short, **change}, out=tmp_path, options={"step": 1.0})
        assert len(list((tmp_path / "shared").iterdir())) == 2 * count, "two branches each"


def test_rounds_that_were_not_kept_are_trained_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = {**CONFIG["method"], "rounds_local": 1}
    config = {**CONFIG, **LITTLE_DATA, "train": {"max_steps": 1}, "federation": {"rounds": 12}, "method": method}
    first = ablate("potara-rounds", config, out=tmp_path)
    assert sorted({row["round"] for row in first.results["rows"]}) == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    second = ablate("potara-rounds", config, out=tmp_path, options={"rounds": [1, 12]})
    assert "trained anew" in caplog.text
    assert by_client(second, round=12) == by_client(first, round=12)
    kept = {path.name for path in (tmp_path / "runs").rglob("kept/*/*.safetensors")}
    assert kept == {f"{round_:05d}.safetensors" for round_ in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)}


def test_a_grid_is_a_study_whose_runs_a_comparison_finds(root: Path) -> None:
    done = ablate("potara-merge-space", CONFIG, out=root)
    runs = sorted((root / "runs").iterdir())
    events: list[dict[str, Any]] = []
    compared = compare(done.path / "study.yaml", out=root, observer=events.append)
    assert compared.results is not None and not compared.failures
    assert {event["reused"] for event in events} == {True} and sorted((root / "runs").iterdir()) == runs
    rows = [row for row in done.results["rows"] if row["space"] == "product"]
    means = {run["label"]: run["mean"]["mean"] for run in compared.results["runs"] if run["mean"]}
    assert means["product"] == pytest.approx(sum(row["score"] for row in rows) / len(rows), rel=1e-12)


def test_an_interrupted_training_goes_on_to_the_same_numbers(tmp_path: Path, sweep: FinishedAblation) -> None:
    config = {**CONFIG, "checkpoint": {"every_s": 0.0}}
    seen: list[tuple[str, int]] = []

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "round":
            seen.append((event["stage"], event["round"]))
            if seen[-1] == ("federate", 3) and seen.count(("federate", 3)) == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate("potara-weight-sweep", config, out=tmp_path, options={"step": 0.5}, observer=stop)
    interrupted = list(seen)
    done = ablate("potara-weight-sweep", config, out=tmp_path, options={"step": 0.5}, observer=stop)
    assert ("federate", 2) not in seen[len(interrupted) :] and ("local", 1) not in seen[len(interrupted) :]
    assert done.results["rows"] == sweep.results["rows"]


def test_seeds_change_partition_and_adapters_and_are_told_apart(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-weight-sweep", CONFIG, out=root, options={"step": 1.0}, seeds=[0, 1])
    rows = {seed: by_client(done, seed=seed, computed=True) for seed in (0, 1)}
    assert rows[0]["client-00"]["w"] == by_client(sweep, computed=True)["client-00"]["w"]
    assert rows[0]["client-00"]["w"] != rows[1]["client-00"]["w"]
    found = [read_json(path)["data"]["partition"]["sha256"] for path in root.rglob("run.json")]
    assert len(set(found)) == 2
    assert any("±" in sentence for sentence in done.findings.sentences)
