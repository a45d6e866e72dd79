"""What survives: killed processes, and a SuperLink that starts again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.runs.runner import run
from tests.integration.flower_network import Network, wait_for
from tests.unit.flower.loopback import write_site
from tests.unit.flower.states import local_memories, same, server_memory, site_memories


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("federation")) as network:
        for number in range(2):
            site = write_site(network.folder / f"site-{number}", f"client-0{number}")
            network.register(site)
            start_worker(network, number)
            network.connect(f"node-{number}", site)
        yield network


def site_of(network: Network, number: int) -> Path:
    return network.folder / f"site-{number}" / "site.yaml"


def start_worker(network: Network, number: int) -> None:
    network.start(f"worker-{number}", ["python", "-m", "befit", "worker", site_of(network, number)])


def experiment(engine: dict[str, Any], method: str = "ditto", rounds: int = 3, steps: int = 2) -> Experiment:
    return load_experiment(
        {
            "name": "small",
            "benchmark": {"name": "digits", "clients": 2},
            "train": {"max_steps": steps},
            "federation": {"rounds": rounds},
            "baselines": [],
            "report": {"plots": False},
            "method": method,
            "engine": engine,
        }
    )


def rounds_done(run_dir: Path) -> int:
    path = run_dir / "checkpoint.json"
    return json.loads(path.read_text())["round"] if path.exists() else 0


def assert_equal_to_local(network: Network, remote: Path, wanted: Experiment) -> None:
    local = network.folder / f"{remote.name}-local"
    run(wanted, out=local)
    by_client = {f"client-0{number}": site_of(network, number) for number in range(2)}
    assert same(server_memory(remote), server_memory(local))
    ends = site_memories(remote, by_client, wanted.method["name"])
    assert all(same(ends[client], memory) for client, memory in local_memories(local).items())


@pytest.mark.slow
def test_a_worker_killed_in_a_round_and_a_superlink_killed_after_it_change_no_number(network: Network) -> None:
    """The handler takes over from the worker; the run resumes on the same database; the end is the local run's."""
    app, remote = network.folder / "app", network.folder / "resumed"
    write_app(experiment({"kind": "flower"}), app, remote)
    network.run(app)
    wait_for("the first round", lambda: rounds_done(remote) >= 1)
    network.stop("worker-1", signal.SIGKILL)
    wait_for("the second round", lambda: rounds_done(remote) >= 2)
    network.stop("link", signal.SIGKILL)
    assert not (remote / "report.html").exists()
    network.start_link()
    network.wait_for_end(network.run(app, "resume=true"))
    assert_equal_to_local(network, remote, experiment({"store": "disk"}))
    start_worker(network, 1)


@pytest.mark.slow
def test_a_node_killed_in_a_round_costs_its_replies_and_comes_back_with_its_memory(network: Network) -> None:
    """Killed in round 2: those rounds go on with the other client. Back, it goes on from its own last memory."""
    app, remote = network.folder / "app-killed", network.folder / "killed"
    write_app(experiment({"kind": "flower", "deadline_s": 12}, "fedsa", rounds=60), app, remote)
    number = network.run(app)
    wait_for("the first round", lambda: rounds_done(remote) >= 1)
    network.stop("node-1", signal.SIGKILL)
    before = rounds_done(remote)
    wait_for("a round without it", lambda: rounds_done(remote) >= before + 2)
    lines = [json.loads(line) for line in (remote / "metrics.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["kind"] == "failure"]
    assert {line["client"] for line in failed} == {"client-01"}
    assert {line["error"] for line in failed} <= {"late", "offline"}
    stamp = next(path for path in (site_of(network, 1).parent / "state").rglob("fedsa/stamp.json"))
    trained = json.loads(stamp.read_text())["number"]
    assert trained >= 1

    def back() -> bool:
        """Flower refuses the same key for up to a minute: whoever keeps a SuperNode running tries again."""
        if "node-1" not in network.processes or network.processes["node-1"].poll() is not None:
            network.connect("node-1", site_of(network, 1))
        return json.loads(stamp.read_text())["number"] > trained

    wait_for("its return", back)
    network.flwr("stop", number, "befit")
    assert json.loads(stamp.read_text())["last"]["last"] > before
