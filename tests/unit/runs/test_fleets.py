"""The size of fleets: as configured, or what the first rounds show; kept for a run that is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from befit.adapters.model import AdaptedModel
from befit.config.load import load_experiment
from befit.core.errors import DataError
from befit.core.storage import read_sealed
from befit.core.values import ClientInfo, Cost, Failure, Payload, Tick, Update
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.protocol.store import ClientStore
from befit.runs import fleets, processes
from befit.runs.fleets import MOST, TRIALS, Fleets
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.runner import check, run
from befit.runs.workers import PipeEnd
from befit.train import fleet
from tests.backbones import short_vit
from tests.tiny import tiny_model

CLIENTS = 4


@pytest.fixture(scope="module")
def model() -> AdaptedModel:
    return AdaptedModel(tiny_model("vit"))


def replies(seconds: float) -> Iterator[Update]:
    for number in range(CLIENTS):
        yield Update(ClientInfo(str(number), "b", 1), Payload(), cost=Cost(cpu_seconds=seconds, seconds=99.0 * number))


def rounds(chooser: Fleets, alone: float, fleet: float, first: int, last: int, stage: str = "federate") -> list[int]:
    """The sizes of these rounds, whose clients take so many seconds each; the first round's count for nothing."""
    sizes = []
    for number in range(first, last + 1):
        at = Tick(stage, number, 20, 0)
        sizes.append(chooser.size(at))
        list(chooser.watched(at, replies(1e3 if number == 1 else alone if sizes[-1] == 1 else fleet)))
    return sizes


@pytest.mark.parametrize(("fleet", "size"), [(0.5, MOST["cpu"]), (0.95, 1), (1.4, 1)])
def test_the_faster_kind_is_chosen_from_rounds_of_either(model: AdaptedModel, fleet: float, size: int) -> None:
    """A fleet has to be clearly faster, since it costs equality to the bit."""
    told: list[dict[str, Any]] = []
    chooser = Fleets("auto", model, {})
    chooser.told = told.append
    most = MOST["cpu"]
    assert rounds(chooser, 1.0, fleet, 1, 8) == [most, 1, most, 1, most, size, size, size]
    assert chooser.chosen() == {"federate": size}
    (event,) = told
    assert (event["kind"], event["stage"], event["round"], event["size"]) == ("fleet", "federate", TRIALS + 1, size)
    assert event["reason"] == f"{fleet:.3g} s a client in a fleet, 1 s one by one"
    assert rounds(chooser, 1.0, fleet, 1, 3, "local") == [most, 1, most]  # another stage is another matter


def test_measuring_goes_on_where_a_run_was_interrupted(model: AdaptedModel) -> None:
    known: dict[str, Any] = {}
    first = rounds(Fleets("auto", model, known), 1.0, 0.5, 1, 3)
    rest = rounds(Fleets("auto", model, known), 1.0, 0.5, 4, 7)
    assert first + rest == rounds(Fleets("auto", model, {}), 1.0, 0.5, 1, 7)
    assert rounds(Fleets("auto", model, known), 1.0, 50.0, 8, 9) == [MOST["cpu"]] * 2  # what is chosen stays


@pytest.mark.parametrize("most", [1, 8])
def test_no_more_are_chosen_than_there_can_be(model: AdaptedModel, most: int) -> None:
    events: list[dict[str, Any]] = []
    chooser = Fleets("auto", model, {})
    chooser.told = events.append
    chooser.hold(Tick("federate", 1, 20, 0), most)
    assert set(rounds(chooser, 1.0, 0.1, 1, TRIALS + 2)) == {1, most}
    assert chooser.chosen() == {"federate": most}
    assert [event["size"] for event in events] == ([1] if most == 1 else [most, most])


def test_a_client_by_itself_tells_nothing_of_fleets(model: AdaptedModel) -> None:
    """As where rounds are asynchronous, and a reply is trained for when it is due."""
    chooser, at = Fleets("auto", model, {}), Tick("federate", 1, 20, 0)
    for _ in range(2 * TRIALS):
        (reply,) = chooser.watched(at, islice(replies(1.0), 1))
        assert isinstance(reply, Update)
    assert rounds(chooser, 1.0, 0.1, 2, 2) == [MOST["cpu"]] and not chooser.chosen()


def test_a_number_is_what_it_says_and_nothing_is_measured(model: AdaptedModel) -> None:
    known: dict[str, Any] = {}
    chooser = Fleets(3, model, known)
    assert rounds(chooser, 1.0, 0.1, 1, 3) == [3, 3, 3]
    assert not known
    assert not chooser.chosen()


def test_a_large_backbone_on_a_processor_is_not_tried(model: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SMALL", 100)
    assert rounds(Fleets("auto", model, {}), 1.0, 0.1, 1, 2) == [1, 1]


def test_the_estimate_counts_the_clients_of_a_fleet() -> None:
    """Four clients: four times the activations of images, and each one's arrays, gradients and averages."""
    one, four, automatic = (check(settings(fleet=size))["memory_parts_mib"] for size in (1, 4, "auto"))
    assert four["activations"] == 4 * one["activations"]
    assert 3 < four["adapters"] / one["adapters"] <= 5
    assert four["backbone"] == one["backbone"]
    assert automatic == four  # there are no more clients
    shared_out = check(settings(fleet=4, workers=2))["memory_parts_mib"]
    assert shared_out["activations"] == 2 * one["activations"]
    of_a_cohort = check({**settings(fleet=4, workers=2), "federation": {"cohort": 2}})["memory_parts_mib"]
    assert of_a_cohort == shared_out  # whose clients may all be one worker's


@pytest.mark.parametrize(
    "change",
    [{"method": "fedavg"}, {"privacy": {"unit": "example", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}}],
)
def test_the_estimate_knows_who_trains_alone(change: dict[str, Any]) -> None:
    one, four = (check({**settings(fleet=size), **change})["memory_parts_mib"] for size in (1, 4))
    assert one == four


def test_the_estimate_knows_that_a_large_backbone_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SMALL", 100)
    one, automatic = (check(settings(fleet=size))["memory_parts_mib"] for size in (1, "auto"))
    assert one == automatic


def test_a_client_whose_data_cannot_be_had_fails_alone() -> None:
    """Data are read when a client's site is made, in a fleet for all of it before anybody trains."""
    experiment = load_experiment(settings(fleet=CLIENTS))
    host, method = Host(experiment), build_method("fedit")
    (stage,), at = method.plan(), Tick("federate", 1, 1, 0)
    start = stage.exchange.dispatch(method.server_init(host.install(method)), host.infos[0], at)

    def site(info: ClientInfo) -> Site:
        if info.id == "client-01":
            raise DataError("its file is gone")
        return host.site(info)

    engine = LocalEngine(method, host.infos, site, ClientStore(None), fleets=Fleets(CLIENTS, host.model, {}))
    replies = list(engine.exchange(dict.fromkeys((info.id for info in host.infos), start), at))
    failed = [reply for reply in replies if isinstance(reply, Failure)]
    assert len(replies) == CLIENTS
    assert [(one.client, one.reason) for one in failed] == [("client-01", "its file is gone")]


class Stop(BaseException):
    """Ends a run in the middle, as a crash does."""


def settings(**engine: Any) -> dict[str, Any]:
    return {
        "benchmark": {"name": "digits", "clients": CLIENTS, "alpha": 10.0},
        "model": {"id": short_vit()},
        "limit": {"records": 24},
        "method": "ditto",
        "baselines": [],
        "train": {"max_steps": 1, "lr": 5e-3},
        "federation": {"rounds": 7},
        "engine": engine,
        "checkpoint": {"every_s": 0},
        "report": {"plots": False},
    }


def traces(path: Path) -> dict[str, Any]:
    """The adapters and the numbers of a run."""
    found: dict[str, Any] = {"metrics": (path / "metrics.jsonl").read_bytes()}
    for file in sorted((path / "clients").rglob("*.safetensors")):
        found[str(file.relative_to(path))] = file.read_bytes()
    return found


def test_a_resumed_run_goes_on_with_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed once a fleet is chosen, and resumed where a fleet would never be: it ends as the whole run does."""
    monkeypatch.setattr(fleets, "GAIN", float("inf"))
    whole = run(settings(fleet="auto"), out=tmp_path / "whole")
    assert whole.results["fleet"] == {"federate": MOST["cpu"]}

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "client" and event["round"] == TRIALS + 3:
            raise Stop

    with pytest.raises(Stop):
        run(settings(fleet="auto"), out=tmp_path / "cut", observer=stop)
    assert read_sealed(tmp_path / "cut" / "checkpoint.json")["notes"]["federate"]["size"] == MOST["cpu"]
    monkeypatch.setattr(fleets, "GAIN", 0.0)
    resumed = run(settings(fleet="auto"), out=tmp_path / "cut", resume=True)
    assert resumed.results["fleet"] == whole.results["fleet"]
    assert traces(resumed.path) == traces(whole.path)
    alone = run(settings(fleet="auto"), out=tmp_path / "alone")
    assert alone.results["fleet"] == {"federate": 1}
    assert traces(alone.path) != traces(whole.path)  # so the bits above say something


def test_what_the_memory_does_not_hold_is_tried_once_also_by_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory holds two clients in the first round, and all of them later, which would be other roundings."""
    real, tried, events = fleet.at_once, list[int](), list[dict[str, Any]]()

    def at_once(asked: Any, *others: Any) -> Any:
        tried.append(len(asked))
        if len(asked) > 2 and asked[0].at.round == 1:
            raise torch.OutOfMemoryError("the card is full")
        return real(asked, *others)

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "client" and event["round"] == 3:
            raise Stop

    monkeypatch.setattr(fleet, "at_once", at_once)
    whole = run(settings(fleet=CLIENTS), out=tmp_path / "whole", observer=events.append)
    assert tried[0] == CLIENTS and max(tried[1:]) == 2
    assert [event["size"] for event in events if event["kind"] == "fleet"] == [2]
    assert caplog.text.count("the card is full") == 1
    with pytest.raises(Stop):
        run(settings(fleet=CLIENTS), out=tmp_path / "cut", observer=stop)
    resumed = run(settings(fleet=CLIENTS), out=tmp_path / "cut", resume=True)
    assert traces(resumed.path) == traces(whole.path)


class InThisProcess(PipeEnd):
    """A worker at the other end of the same pipe, but in a thread: it starts at once, and a test sees what it does."""

    def __init__(self, module: str, patience: float) -> None:
        ours, theirs = Pipe()
        super().__init__(ours)
        self._thread = Thread(target=processes.work, args=(PipeEnd(theirs),))
        self._thread.start()

    def stop(self) -> None:
        self.connection.close()
        self._thread.join()


def test_what_the_memory_of_a_worker_does_not_hold_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by new workers, which know nothing of it, for a run that goes on."""
    real, tried, known = fleet.at_once, list[int](), dict[str, Any]()

    def at_once(asked: Any, *others: Any) -> Any:
        tried.append(len(asked))
        if len(asked) > 2:
            raise torch.OutOfMemoryError("the card is full")
        return real(asked, *others)

    monkeypatch.setattr(fleet, "at_once", at_once)
    monkeypatch.setattr(processes, "Worker", InThisProcess)
    monkeypatch.setattr(fleets, "most_at_once", lambda: None)  # of the process that has the workers
    experiment, method = load_experiment(settings()), build_method("fedit")
    host = Host(experiment)
    server = method.server_init(host.install(method))
    for number, expected in ((1, [4, 2, 2]), (2, [2, 2])):
        at, tried[:] = Tick("federate", number, 2, 0), []
        requests = {info.id: method.plan()[0].exchange.dispatch(server, info, at) for info in host.infos}
        chooser = Fleets(CLIENTS, host.model, known)
        with processes.MultiprocessEngine(
            experiment, {"name": "fedit"}, host.infos, tmp_path / str(number), 1, chooser
        ) as engine:
            assert all(isinstance(reply, Update) for reply in engine.exchange(requests, at))
        assert tried == expected
