"""Logs with numbers that no client can have meant, as clients could once put there: a run is resumed and reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from befit.report import write_report
from befit.runs.runner import run

Line = dict[str, Any]
CONFIG: dict[str, Any] = {
    "name": "logs",
    "benchmark": {"name": "digits", "clients": 2},
    "method": "fisher_merging",
    "train": {"max_steps": 1},
    "federation": {"rounds": 2},
    "evaluate": {"every": 1},
    "baselines": ["local"],
    "checkpoint": {"every_s": 0},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(CONFIG, out=tmp_path_factory.mktemp("finished") / "run").path


def change(path: Path, of: Callable[[Line], bool], **values: Any) -> None:
    """Other values in the lines of a log, and the length that its checkpoint knows."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **values} if of(line) else line for line in lines]
    assert changed != lines
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    checkpoint = path.parent / "checkpoint.json"
    saved = json.loads(checkpoint.read_text())
    saved["lengths"][path.name] = path.stat().st_size
    checkpoint.write_text(json.dumps(saved))


WRONG: dict[str, tuple[str, Callable[[Line], bool], dict[str, Any]]] = {
    "seconds of 1e308": ("ledger", lambda line: True, {"seconds": 1e308}),
    "a peak of 1e308": ("ledger", lambda line: True, {"peak_memory_mib": 1e308}),
    "an accuracy of 1e308": ("metrics", lambda line: line.get("metric") == "accuracy", {"value": 1e308}),
    "an accuracy of -7": ("metrics", lambda line: line.get("metric") == "accuracy", {"value": -7.0}),
    "one accuracy of -1e308": (
        "metrics",
        lambda line: line.get("metric") == "accuracy" and line["client"] == "client-00",
        {"value": -1e308},
    ),
    "a loss of a score of 1e308": ("metrics", lambda line: line.get("metric") == "loss", {"value": 1e308}),
    "a loss of 1e308": ("metrics", lambda line: line["kind"] == "train", {"loss": 1e308}),
    "no loss": ("metrics", lambda line: line["kind"] == "train", {"loss": None}),
    "2**31 steps": ("metrics", lambda line: line["kind"] == "train", {"steps": 2**31}),
    "a diagnostic of 1e308": ("metrics", lambda line: line["kind"] == "diagnostic", {"value": 1e308}),
    "no diagnostic": ("metrics", lambda line: line["kind"] == "diagnostic", {"value": None}),
    "a diagnostic of another name": (
        "metrics",
        lambda line: line["kind"] == "diagnostic" and line["client"] == "client-00",
        {"name": "more"},
    ),
    "2**31 examples": ("metrics", lambda line: line["kind"] == "score", {"examples": 2**31 - 1}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_run_whose_logs_hold_what_cannot_be_is_finished_and_reported(case: str, finished: Path) -> None:
    name, of, values = WRONG[case]
    log = finished / f"{name}.jsonl"
    kept = {path: path.read_bytes() for path in (log, finished / "checkpoint.json")}
    try:
        change(log, of, **values)
        for result in ("method.json", "results.json", "report.html", "report.md"):
            (finished / result).unlink()
        done = run(CONFIG, out=finished, resume=True)
        assert (finished / "report.html").stat().st_size > 10_000
        assert set(done.results["clients"]) == {"client-00", "client-01"}
        write_report(finished)
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
