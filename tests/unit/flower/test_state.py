"""What a site keeps: in a folder that is its own, and unharmed where the disk is full."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, RunError
from befit.core.values import State
from befit.flower.at_sites import hello
from befit.flower.call import call, worker_file
from befit.flower.doctor import examine
from befit.flower.frame import unpack
from befit.flower.server_app import run_over
from befit.flower.service import SiteService
from befit.flower.site_file import claim, load_site
from befit.flower.worker import serve_site
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.test_consent import begin, request_of
from tests.unit.flower.test_worker import without_service
from tests.unit.flower.test_worker import worker as worker  # a fixture

Make = Callable[..., Experiment]


def two_files(folder: Path) -> tuple[Path, Path]:
    """Two site files in one folder, whose state is one folder unless they say otherwise."""
    second = write_site(folder, "client-01").rename(folder / "second.yaml")
    return write_site(folder, "client-00"), second


def answered(reply: bytes) -> dict[str, Any]:
    return unpack(reply, "a reply")[0]


def test_the_second_site_of_a_folder_is_refused_everywhere(
    worker: BaseProcess, sites: list[Path], experiment: Make
) -> None:
    """The first one has a worker, which answers for itself alone."""
    _, second = two_files(sites[0].parent)
    first, other, request = load_site(sites[0]), load_site(second), hello(experiment(), "trial")
    assert answered(call(first, request))["client"] == "client-00"
    before = {path: path.read_bytes() for path in Path(first.state).rglob("*") if path.is_file()}
    said = answered(call(other, request))
    assert (said["kind"], said["client"]) == ("failure", "client-01") and str(sites[0].parent) not in said["reason"]
    with pytest.raises(RunError, match=r"is the folder of site client-00, and this is site client-01\. Give it one of"):
        serve_site(second)
    (found,) = [one for one in examine(second, None, Path("none"), Path("none")) if one.what == "state" and one.mend]
    assert "the folder of site client-00" in found.found
    assert {path: path.read_bytes() for path in Path(first.state).rglob("*") if path.is_file()} == before
    second.write_text(second.read_text() + "state: state-client-01\n")
    assert answered(call(load_site(second), request))["client"] == "client-01"


def test_a_server_learns_which_site_cannot_take_part_and_no_place(experiment: Make, tmp_path: Path) -> None:
    both = experiment(federation={"rounds": 1, "min_replies": 2})
    with pytest.raises(ConfigError, match="client client-01: the site cannot use its state folder") as refused:
        run_over(LoopbackGrid(two_files(tmp_path / "both")), both, tmp_path / "run", poll_s=0.01)
    assert "both" not in str(refused.value)


def test_a_folder_is_claimed_once_and_keeps_its_mark(tmp_path: Path) -> None:
    site = load_site(write_site(tmp_path, "client-00"))
    assert claim(site) == claim(site) == tmp_path / "state"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["client"]


def test_a_full_disk_is_an_answer_and_costs_neither_the_worker_nor_the_memory(
    worker: BaseProcess, sites: list[Path], experiment: Make
) -> None:
    """No file may grow beyond a byte, as the system sees to: the write fails in the middle. With room again, the same
    request gets what a site gets that never ran out of it."""
    site, folder = load_site(sites[0]), Path(load_site(sites[0]).state) / "runs" / "r" / "ditto"
    settings = experiment("ditto", model={"id": "digits-vit"})
    for run in ("r", "unharmed"):
        begin(lambda hello: call(site, hello), settings, label="ditto", run=run)

    def asked(run: str, number: int, arrays: State | None = None) -> bytes:
        at = {"stage": "federate", "round": number, "rounds": 2, "seed": 0, "span": 1}
        return request_of(settings, arrays, label="ditto", at=at, run=run)

    said, sent = unpack(call(site, asked("r", 1)), "a reply")
    assert said["kind"] == "update"
    second = asked("r", 2, sent)
    stamp = (folder / "stamp.json").read_bytes()
    files = {path.name for path in folder.iterdir()}
    assert worker.pid
    limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    for _ in range(2):
        said = answered(call(site, second))
        assert (said["kind"], said["error"]) == ("failure", "RunError") and str(folder) not in said["reason"]
    assert (folder / "stamp.json").read_bytes() == stamp and worker.is_alive()
    assert {path.name for path in folder.iterdir()} == files
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
    after = call(site, second)
    call(site, asked("unharmed", 1))
    assert worker.is_alive() and worker_file(site).exists()
    mine, never = unpack(after, "a reply")[1], unpack(call(site, asked("unharmed", 2, sent)), "a reply")[1]
    assert mine.keys() == never.keys() and all(bool((mine[key] == never[key]).all()) for key in mine)
    assert json.loads((folder / "stamp.json").read_text())["last"]["last"] == 2


def test_a_site_file_that_breaks_while_the_worker_runs_does_not_end_it(
    worker: BaseProcess, sites: list[Path], experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, request, text = load_site(sites[0]), hello(experiment(), "trial"), sites[0].read_text()
    sites[0].write_text("client: [")
    assert answered(call(site, request))["kind"] == "hello"  # cold, by the file as it was when Flower's process began
    sites[0].write_text(text)
    without_service(monkeypatch)
    assert answered(call(site, request))["kind"] == "hello"


def test_what_goes_wrong_where_nothing_can_be_written_is_answered_in_this_process_too(
    sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """A state folder that is a file."""
    sites[0].write_text(sites[0].read_text() + "state: taken\n")
    (sites[0].parent / "taken").write_text("")
    site = load_site(sites[0])
    said = answered(SiteService(site).answer(hello(experiment(), "trial")))
    assert said["kind"] == "failure" and "taken" not in said["reason"]
