"""What a run took, of the wall's time and of processors', at the clients and at the server."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from befit.core.storage import log_line, read_lines
from befit.core.values import Clock, Cost
from befit.runs.results import method_results
from befit.runs.runner import run

LINE = {"bytes_up": 1, "bytes_down": 2}


def test_a_clock_tells_the_walls_time_and_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, step in (("perf_counter", 5.0), ("process_time", 2.0)):
        monkeypatch.setattr(time, name, itertools.count(100.0, step).__next__)
    assert Clock().cost(1, 2, 3.0) == Cost(1, 2, 5.0, 3.0, 2.0)


def test_costs_add_up_and_keep_the_highest_memory() -> None:
    assert Cost(1, 2, 3.0, 10.0, 4.0) + Cost(5, 6, 7.0, 9.0, 8.0) == Cost(6, 8, 10.0, 10.0, 12.0)


def test_results_have_both_times_of_every_client_and_the_servers_own_apart(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"stage": stage, "round": at, "client": client, "purpose": purpose, "seconds": wall, "cpu_seconds": cpu}
        for stage, at, client, purpose, wall, cpu in (
            ("opening", 0, None, "server", 30.0, 20.0),
            ("federate", 1, "a", "train", 9.0, 1.0),
            ("federate", 1, "b", "failed", 8.0, 2.0),
            ("federate", 1, None, "server", 3.0, 0.5),
            ("federate", 2, "a", "train", 7.0, 4.0),
            ("federate", 2, "a", "score", 100.0, 100.0),
            ("federate", 2, None, "server", 3.0, 0.25),
        )
    ]
    memory = {"opening": 700.0, "federate": 300.0}
    text = b"".join(log_line({**LINE, **line, "peak_memory_mib": memory[line["stage"]]}) for line in lines)
    (tmp_path / "ledger.jsonl").write_bytes(text)
    found = method_results(tmp_path, ["a", "b"], {"a": 3, "b": 3}, "accuracy", ["federate"], ("federate", 2), set())
    rows, summary = found["clients"], found["summary"]
    assert [(row["seconds"], row["cpu_seconds"]) for row in rows.values()] == [(16.0, 5.0), (8.0, 2.0)]
    assert (summary["seconds"], summary["cpu_seconds"]) == (24.0, 7.0)
    assert (summary["server_cpu_seconds"], summary["opening_cpu_seconds"]) == (20.75, 20.0)
    assert (summary["peak_memory_mib"], summary["opening_peak_memory_mib"]) == (300.0, 700.0)
    assert summary["bytes_up"] == 3


def test_a_run_writes_down_what_its_server_computed(tmp_path: Path) -> None:
    """One line for the opening, one for each round of the federated stage, none for personal ones."""
    experiment = {
        "name": "timed",
        "benchmark": {"name": "digits", "clients": 3},
        "limit": {"records": 24},
        "method": {"name": "potara"},
        "baselines": [],
        "train": {"max_steps": 1, "batch_size": 4},
        "federation": {"rounds": 2},
        "report": {"plots": False},
    }
    done = run(experiment, out=tmp_path / "run")
    lines = read_lines(tmp_path / "run" / "ledger.jsonl")
    server = [(line["stage"], line["round"]) for line in lines if line["purpose"] == "server"]
    federated = dict.fromkeys(line["stage"] for line in lines if line["purpose"] == "train" and line["bytes_up"])
    (stage,) = federated
    assert server == [("opening", 0), (stage, 1), (stage, 2)]
    assert all(line["cpu_seconds"] > 0 for line in lines if line["purpose"] == "train")
    summary = done.results["summary"]
    assert summary["cpu_seconds"] == pytest.approx(sum(row["cpu_seconds"] for row in done.results["clients"].values()))
    assert summary["server_cpu_seconds"] >= summary["opening_cpu_seconds"] > 0
