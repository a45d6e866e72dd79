"""The resident worker: the same bytes as a cold start, for those who know the token, and never in the way when gone."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from befit.config.experiment import Experiment
from befit.core.errors import RunError
from befit.flower.at_sites import hello
from befit.flower.call import call, worker_file
from befit.flower.frame import unpack
from befit.flower.service import SiteService
from befit.flower.site_file import load_site
from befit.flower.worker import _announced, serve_site
from tests import processes
from tests.processes import PATIENCE
from tests.unit.flower.test_consent import begin, request_of

Make = Callable[..., Experiment]


@pytest.fixture
def worker(sites: list[Path]) -> Iterator[BaseProcess]:
    process = processes.begin(processes.befit, "worker", str(sites[0]), "-q")
    end = time.monotonic() + PATIENCE
    while not worker_file(load_site(sites[0])).exists():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.05)
    yield process
    process.kill()
    process.join()


def tell(worker: BaseProcess, signal_: int) -> None:
    assert worker.pid
    os.kill(worker.pid, signal_)


def without_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SiteService, request: bytes) -> bytes:
        raise AssertionError("a cold start")

    monkeypatch.setattr(SiteService, "answer", refuse)


def test_a_worker_answers_what_a_cold_start_answers(
    worker: BaseProcess, sites: list[Path], experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, request = load_site(sites[0]), hello(experiment(), "trial")
    cold = SiteService(site).answer(request)
    without_service(monkeypatch)
    assert call(site, request) == call(site, request) == cold


def test_a_killed_worker_is_replaced_by_a_cold_start(worker: BaseProcess, sites: list[Path], experiment: Make) -> None:
    site, request = load_site(sites[0]), hello(experiment(), "trial")
    warm = call(site, request)
    worker.kill()
    worker.join()
    assert worker_file(site).exists()
    assert call(site, request) == warm
    folder = Path(json.loads(worker_file(site).read_text())["address"]).parent
    assert folder.is_dir()
    with _announced(site, "elsewhere", b"token"):
        assert not folder.exists()  # who comes next clears it away


def test_a_worker_that_is_killed_over_a_request_costs_nothing_but_time(
    worker: BaseProcess, sites: list[Path], experiment: Make
) -> None:
    """It has taken the request and does not come to answer it: whoever asked does the work, once."""
    site, settings = load_site(sites[0]), experiment("ditto", model={"id": "digits-vit"})
    request = request_of(settings, label="ditto")
    begin(lambda hello: call(site, hello), settings, label="ditto")
    tell(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call, site, request)
        time.sleep(0.5)
        assert not asked.done()
        worker.kill()
        reply = asked.result(PATIENCE)
    assert unpack(reply, "a reply")[0]["kind"] == "update"
    assert call(site, request) == reply  # the kept one
    stamp = next(Path(site.state).rglob("stamp.json"))
    assert json.loads(stamp.read_text())["number"] == 1


def test_only_its_user_can_read_the_token_and_nobody_gets_in_without(worker: BaseProcess, sites: list[Path]) -> None:
    path = worker_file(load_site(sites[0]))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    address = json.loads(path.read_text())["address"]
    assert stat.S_IMODE(Path(address).parent.stat().st_mode) == 0o700
    for _ in range(2):  # turned away, and still there for the next one
        with pytest.raises(AuthenticationError):
            Client(address, "AF_UNIX", authkey=b"guess")
    assert worker.is_alive()


def test_a_change_of_the_site_file_counts_at_once(worker: BaseProcess, sites: list[Path], experiment: Make) -> None:
    site, request = load_site(sites[0]), hello(experiment(), "trial")
    assert unpack(call(site, request), "a reply")[0]["kind"] == "hello"
    sites[0].write_text(sites[0].read_text() + "methods: [potara]\n")
    refused = unpack(call(site, request), "a reply")[0]
    assert refused["kind"] == "failure" and "not among the site's methods: potara" in refused["reason"]


def test_a_stopped_worker_leaves_nothing_and_a_second_one_is_refused(worker: BaseProcess, sites: list[Path]) -> None:
    path = worker_file(load_site(sites[0]))
    with pytest.raises(RunError, match=re.escape(str(path))):
        serve_site(sites[0])
    address = json.loads(path.read_text())["address"]
    tell(worker, signal.SIGTERM)
    worker.join(PATIENCE)
    assert worker.exitcode == 0
    assert not path.exists() and not os.path.exists(address)


def test_passing_a_message_on_loads_no_torch() -> None:
    """Flower starts this in a new process for every message."""
    code = "import sys, befit.flower.client_app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_signal_to_end_ends_a_worker_quietly_and_is_then_as_before(number: int, sites: list[Path]) -> None:
    def missed(*_: object) -> None:
        raise AssertionError("the worker did not take the signal")

    before = signal.signal(number, missed)
    try:
        serve_site(sites[0], lambda address: os.kill(os.getpid(), number))
        assert signal.getsignal(number) is missed
    finally:
        signal.signal(number, before)
    assert not worker_file(load_site(sites[0])).exists()


def test_a_worker_ignores_what_nohup_lets_it_ignore(sites: list[Path]) -> None:
    heard = []

    def ready(address: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        heard.append("and goes on")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        serve_site(sites[0], ready)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard
