"""Asynchronous runs of this machine: order by a simulated clock, several processes, and a crash in the middle."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.protocol.flights import staleness_weight
from befit.runs.clock import client_time
from befit.runs.runner import check, run
from tests.unit.flower.states import local_memories, same, server_memory


def config(engine: dict[str, Any] | None = None, **federation: Any) -> dict[str, Any]:
    late = {"buffer": 2, "times": 1.5}
    return {
        "name": "late",
        "benchmark": {"name": "digits", "clients": 4, "alpha": 10.0},
        "limit": {"records": 40},
        "method": "fedsa",
        "baselines": [],
        "train": {"max_steps": 2},
        "federation": {"rounds": 6, "asynchronous": late, **federation},
        "report": {"plots": False},
        "evaluate": {"every": 2},
        "engine": {"store": "disk", **(engine or {})},
        "checkpoint": {"every_s": 0},
    }


class Crash(BaseException):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(), out=tmp_path_factory.mktemp("whole") / "run").path


def traces(path: Path) -> tuple[bytes, bytes, Any]:
    clock = json.loads((path / "results.json").read_text())["clock"]
    return (path / "metrics.jsonl").read_bytes(), (path / "outbound.json").read_bytes(), clock


def test_a_killed_run_goes_on_with_whoever_was_at_work(whole: Path, tmp_path: Path) -> None:
    def crash(event: dict[str, Any]) -> None:
        if event["kind"] == "client" and event["round"] == 4:
            raise Crash

    with pytest.raises(Crash):
        run(config(), out=tmp_path / "run", observer=crash)
    assert any(key.startswith("in flight@") for key in server_memory(tmp_path / "run").arrays)
    done = run(config(), out=tmp_path / "run", resume=True).path
    assert traces(done) == traces(whole) and same(server_memory(done), server_memory(whole))
    assert all(same(local_memories(done)[client], memory) for client, memory in local_memories(whole).items())


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(whole: Path, tmp_path: Path) -> None:
    done = run(config({"workers": 2}), out=tmp_path / "run").path
    assert traces(done) == traces(whole) and same(server_memory(done), server_memory(whole))


def test_the_results_say_when_each_round_was_over_and_how_late_updates_were(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    times = sorted(client_time(client, 1.5, 0) for client in results["clients"])
    (over,) = results["clock"].values()
    assert len(over) == 6 and over == sorted(over) and over[0] == times[1]  # the second of four ends the first round
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    late = [line["value"] for line in lines if line.get("name") == "staleness"]
    assert len(late) == 12 and max(late) > 0


def test_times_are_log_normal_of_median_one_and_a_clients_own() -> None:
    logs = [math.log(client_time(f"client-{number}", 0.5, 3)) for number in range(2000)]
    assert abs(statistics.fmean(logs)) < 0.05 and abs(statistics.pstdev(logs) - 0.5) < 0.03
    assert client_time("client-7", 0.5, 3) == math.exp(logs[7]) != client_time("client-7", 0.5, 4)


def test_weights_are_those_of_fedbuff() -> None:
    assert [staleness_weight(behind) for behind in (0, 3, 8)] == [1, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"federation": {"patience": 2}}, "federation.patience: goes back to one round at all clients"),
        ({"federation": {"cohort": 1}}, r"asynchronous.buffer: 2 is more than the cohort of 1"),
        ({"federation": {"secure_sums": {"clip": 1.0}}}, "federation.secure_sums: the masks of a sum"),
        ({"privacy": {"unit": "client", "epsilon": 8, "delta": 1e-3}}, "privacy.unit: client counts by who is drawn"),
        ({"engine": {"kind": "flower"}}, "asynchronous.times: is of a simulated clock"),
        (
            {"federation": {"asynchronous": {"buffer": 2, "times": {"a": 0}}}},
            "or finite times above 0",
        ),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_when_the_configuration_is_read(
    changes: dict[str, Any], text: str
) -> None:
    values = config()
    values |= {key: {**values.get(key, {}), **block} for key, block in changes.items()}
    with pytest.raises(ConfigError, match=text):
        load_experiment(values)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("flexlora", "in stage federate the server needs each client's own reply"),
        ("relora", "clients send more than changes of what they were sent, or the server moves"),
        ("fedsvd", "clients send more than changes of what they were sent, or the server moves"),
        ("scaffold", "clients send more than changes of what they were sent, or the server moves"),
        ("rolora", "take turns in what they move, and a late update has missed its turn"),
    ],
)
def test_a_method_that_late_updates_do_not_fit_is_refused_before_anything_is_trained(method: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"federation.asynchronous: .*{text}"):
        check({**config(), "method": method})


def test_a_buffer_that_is_never_full_and_a_client_that_is_none_are_told() -> None:
    told = check(config(asynchronous={"buffer": 9}))["warnings"]
    assert any("9 are more than the 4 clients" in line for line in told)
    values = config(asynchronous={"buffer": 2, "times": {"client-9": 4}})
    del values["limit"]
    with pytest.raises(ConfigError, match=r"times\.client-9: client-9 is no client"):
        check(values)
