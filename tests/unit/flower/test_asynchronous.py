"""Asynchronous rounds over Flower: replies are taken as they come, whatever round they are of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from befit.config.experiment import Experiment
from befit.flower.frame import from_content, unpack
from befit.flower.server_app import run_over
from befit.runs.runner import run
from tests.backbones import short_vit
from tests.unit.flower.loopback import write_site
from tests.unit.flower.states import same, server_memory
from tests.unit.flower.test_secure_sums import WarmGrid

Make = Callable[..., Experiment]
SLOW = 13  # the node of client-02


class SlowGrid(WarmGrid):
    """What the slow site answers to round r is there once somebody has been asked for round r + 2."""

    def __init__(self, folder: Path) -> None:
        sites = [f"client-0{number}" for number in range(3)]
        super().__init__([write_site(folder / name, name, "limits: {min_records: 1}\n") for name in sites])
        self.asked = 0
        self.rounds: dict[str, int] = {}  # of the slow site's trainings, by message

    def answer(self, message: Message, node: int) -> Message:
        if message.metadata.message_type == "train":
            number = unpack(from_content(message.content), "a request")[0]["at"]["round"]
            self.asked = max(self.asked, number)
            if node == SLOW:
                self.rounds[message.metadata.message_id] = number
        return super().answer(message, node)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [name for name in message_ids if self.asked >= self.rounds.get(name, -2) + 2]
        return super().pull_messages(ready)


def values(engine: str, **late: Any) -> dict[str, Any]:
    return {
        "benchmark": {"name": "digits", "clients": 3},
        "federation": {"rounds": 6, "asynchronous": {"buffer": 2, **late}},
        "evaluate": {"every": 2},
        "engine": {"kind": engine, **({"store": "disk"} if engine == "local" else {"deadline_s": 60})},
    }


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from befit.config.load import load_experiment
    from tests.unit.flower.conftest import SMALL

    slow = {**SMALL, "model": {"id": short_vit()}, **values("local", times={"client-02": 2.5})}
    return run(load_experiment({**slow, "method": "fedsa"}), out=tmp_path_factory.mktemp("local") / "run").path


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_a_slow_site_holds_nobody_up_and_its_late_replies_count(experiment: Make, local: Path, tmp_path: Path) -> None:
    """In the order of the simulated clock the numbers are those of the simulation, to the bit. A site that trains is
    not measured between rounds, and at the end all are."""
    done = run_over(SlowGrid(tmp_path), experiment("fedsa", **values("flower")), tmp_path / "run", poll_s=0.01).path
    assert same(server_memory(done), server_memory(local))
    for kind in ("train", "diagnostic"):
        assert lines(done, kind) == lines(local, kind)
    assert {line["value"] for line in lines(done, "diagnostic")} == {0.0, 1.0, 2.0} and not lines(done, "failure")
    scored = [{one["client"][-1] for one in lines(done, "score") if one["round"] == number} for number in (2, 6)]
    assert scored == [{"0", "1"}, {"0", "1", "2"}]


class Stop(BaseException):
    """Ends the server as a crash would."""


def test_a_server_that_stops_asks_again_for_what_was_under_way(experiment: Make, local: Path, tmp_path: Path) -> None:
    grid = SlowGrid(tmp_path)

    def crash(reply: Message, node: int) -> Message:
        header, _ = unpack(from_content(reply.content), "a reply")
        if header["kind"] == "update" and header["at"]["round"] == 5:
            raise Stop
        return reply

    grid.tamper = crash
    with pytest.raises(Stop):
        run_over(grid, experiment("fedsa", **values("flower")), tmp_path / "run", poll_s=0.01)
    grid.tamper, grid.asked = lambda reply, node: reply, 0
    resumed = experiment("fedsa", **values("flower"))
    done = run_over(grid, resumed, tmp_path / "run", resume=True, poll_s=0.01).path
    assert same(server_memory(done), server_memory(local)) and lines(done, "train") == lines(local, "train")


def test_when_no_more_replies_can_come_a_round_goes_on_with_those_that_have(experiment: Make, tmp_path: Path) -> None:
    """Two of three replies are lost, and two make a round: it ends at the deadline, and both sites are asked anew."""
    grid = SlowGrid(tmp_path)

    def lose(reply: Message, node: int) -> Message | None:
        header, _ = unpack(from_content(reply.content), "a reply")
        return None if node != 11 and header["kind"] == "update" and header["at"]["round"] == 1 else reply

    grid.tamper = lose
    late = values("flower") | {"federation": {"rounds": 3, "asynchronous": {"buffer": 2}}}
    late["engine"] = {"kind": "flower", "deadline_s": 0.3}
    done = run_over(grid, experiment("fedsa", **late), tmp_path / "run", poll_s=0.01).path
    failed = [(line["client"], line["round"], line["error"]) for line in lines(done, "failure")]
    assert failed[:2] == [("client-01", 1, "late"), ("client-02", 1, "late")]
    trained = [(line["round"], line["client"][-1]) for line in lines(done, "train")]
    assert trained[:3] == [(1, "0"), (2, "0"), (2, "1")]
