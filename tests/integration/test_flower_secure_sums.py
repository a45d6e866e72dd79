"""Secure sums over real processes: four sites that know each other's keys, and one that is killed in mid-round."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.storage import read_sealed
from befit.core.yamlfile import write_yaml
from befit.flower.app_folder import write_app
from befit.flower.consortium import load_consortium
from befit.flower.consortium_folder import write_consortium
from befit.flower.frame import from_content, unpack
from befit.flower.server_app import run_over
from befit.flower.site_file import load_site
from befit.runs.runner import run
from tests.integration.flower_network import Network, wait_for
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import adapters, same, server_memory

CLIENTS = [f"client-0{number}" for number in range(4)]
KILLED = CLIENTS[2]


def small(**engine: Any) -> Experiment:
    return load_experiment(
        {
            "name": "sums",
            "benchmark": {"name": "digits", "clients": 4},
            "limit": {"records": 24},
            "train": {"max_steps": 2},
            "federation": {"rounds": 1, "secure_sums": {"clip": 20.0}},
            "method": "ditto",
            "baselines": [],
            "report": {"plots": False},
            "engine": engine,
        }
    )


class Federation(Network):
    """What `befit flower init` writes for the sites, over this network's SuperLink."""

    def write(self) -> Path:
        source, out = self.folder / "consortium.yaml", self.folder / "federation"
        source.write_text(write_yaml({"server": {"host": "localhost"}, "sites": dict.fromkeys(CLIENTS), "run": RUN}))
        write_consortium(load_consortium(source), out)
        return out

    def join(self, client: str) -> None:
        folder = self.folder / "federation" / "sites" / client
        self.flwr("supernode", "register", str(folder / "keys" / "site.pub"), "befit")
        self.start(f"worker-{client}", ["python", "-m", "befit", "worker", folder / "site.yaml"])
        self.connect(f"node-{client}", folder / "site.yaml")

    def app(self, name: str, deadline_s: float) -> Path:
        sites = self.folder / "federation" / "sites"
        keys = {client: str(sites / client / "keys" / "site.pub") for client in CLIENTS}
        write_app(
            small(kind="flower", keys=keys, deadline_s=deadline_s), self.folder / name, self.folder / f"run-{name}"
        )
        return self.folder / name


RUN = {"benchmark": {"name": "digits", "clients": 4}, "method": "ditto", "federation": {"secure_sums": {"clip": 20}}}


def kept(sites: Path, run_: Path, client: str) -> Path:
    """Where a site keeps a run."""
    name = json.loads((run_ / ".sites.json").read_text())["run"]
    return sites / client / "state" / "runs" / name / "ditto"


@pytest.mark.slow
def test_sites_sign_and_hide_and_a_site_killed_in_mid_round_costs_its_own_update(tmp_path: Path) -> None:
    """A round with all, whose adapters are the local run's to the bit. Then a round in which a site has sent its shares
    and is killed over its training, whose sum is that of the other three."""
    with Federation(tmp_path) as network:
        sites = network.write() / "sites"
        assert all(load_site(sites / client / "site.yaml").require_secure_sums for client in CLIENTS)
        for client in CLIENTS:
            network.join(client)
        whole = network.run(network.app("whole", 600))
        local = run(small(store="disk"), out=tmp_path / "local").path
        network.wait_for_end(whole)
        remote = tmp_path / "run-whole"
        assert same(server_memory(remote), server_memory(local))
        folders = {client: kept(sites, remote, client) for client in CLIENTS}
        assert adapters(folders) == adapters(dict.fromkeys(CLIENTS, local))
        (row,) = [row for row in json.loads((remote / "outbound.json").read_text())[KILLED] if row["name"] == "words"]
        assert row["count"] == 2  # its signatures of its keys and of the list

        broken = network.run(network.app("broken", 120))
        remote = tmp_path / "run-broken"
        wait_for("the first messages", lambda: (remote / ".sites.json").exists())
        vault = kept(sites, remote, KILLED) / "secure.json"
        lock = FileLock(sites / KILLED / "state" / ".lock")  # which a site holds while it answers

        def holds_shares() -> bool:
            """Keeps the lock, so that the site can answer nothing more."""
            if not vault.exists():
                return False
            lock.acquire()
            if read_sealed(vault)["clients"][KILLED]["member"]["shares"]:
                return True
            lock.release()
            return False

        wait_for("the shares of the one that is killed", holds_shares)
        wait_for("an update of another", lambda: (kept(sites, remote, CLIENTS[0]) / "stamp.json").exists())
        for name in (f"node-{KILLED}", f"worker-{KILLED}"):
            network.stop(name, signal.SIGKILL)
        lock.release()
        network.wait_for_end(broken)
    failures = json.loads((remote / "results.json").read_text())["failures"]
    assert failures[0]["stage"] == "federate" and failures[0]["kind"] in ("late", "offline")
    assert {one["client"] for one in failures} == {KILLED}
    assert same(server_memory(remote), server_memory(without(tmp_path)))


def without(folder: Path) -> Path:
    """The same run in this process, in which nobody hears of that site's update."""
    sites = [write_site(folder / f"here-{client}", client) for client in CLIENTS]
    grid = LoopbackGrid(sites)

    def lose(reply: Any, node: int) -> Any:
        header, arrays = unpack(from_content(reply.content), "a reply")
        return None if header["client"] == KILLED and "hidden" in arrays else reply

    grid.tamper = lose
    return run_over(grid, small(kind="flower", deadline_s=0.2), folder / "here", poll_s=0.01).path
