"""A federation over real processes: SuperLink, SuperNodes, TLS, node authentication, on loopback; and who may join."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.flower.doctor import Finding, examine
from befit.flower.keys import write_certificates, write_site_keys
from befit.runs.runner import run
from tests.integration.flower_network import Network, wait_for
from tests.unit.flower.loopback import write_site
from tests.unit.flower.states import adapters, local_memories, same, server_memory, site_folder, site_memories

# Clients and method; tests/unit/flower/test_same_numbers.py holds every method to it without a network.
METHODS: dict[str, tuple[int, Any]] = {"ditto": (2, "ditto")}
MORE: dict[str, tuple[int, Any]] = {
    "knots": (3, {"name": "guidance", "guide": "parametric", "merge": {"space": "knots", "rule": "ties"}}),
    "fedit": (3, "fedit"),
    "fedsa": (3, "fedsa"),
    "fedalt": (2, "fedalt"),
    "potara": (2, "potara"),
    "scaffold": (2, "scaffold"),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two sites with befit's executor and a resident worker: without one every message loads torch."""
    with Network(tmp_path_factory.mktemp("federation")) as network:
        for number in range(2):
            join(network, number, worker=True, executor=True)
        yield network


def join(network: Network, number: int, worker: bool, executor: bool) -> None:
    site = write_site(network.folder / f"site-{number}", f"client-0{number}", "shares: [personal, sketch]\n")
    network.register(site)
    if worker:
        network.start(f"worker-{number}", ["python", "-m", "befit", "worker", site])
    network.connect(f"node-{number}", site, executor=executor)


def site_of(network: Network, client: str) -> Path:
    return network.folder / f"site-{client[-1]}" / "site.yaml"


def small(name: str, clients: int, method: Any, engine: dict[str, Any], **more: Any) -> Experiment:
    return load_experiment(
        {
            "name": name,
            "benchmark": {"name": "digits", "clients": clients},
            "limit": {"records": 24},
            "train": {"max_steps": 2},
            "federation": {"rounds": 2},
            "baselines": [],
            "report": {"plots": False},
            "method": method,
            "engine": engine,
            **more,
        }
    )


@pytest.mark.parametrize("methods", [METHODS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["one", "more"])
def test_runs_over_a_network_are_the_local_runs_bit_by_bit(
    methods: dict[str, tuple[int, Any]], network: Network
) -> None:
    """Methods at once, against one SuperLink: server memory, clients' memories, adapters and scores."""
    if methods is MORE:
        join(network, 2, worker=False, executor=False)  # Flower's own process for each message, which loads torch
    numbers: dict[str, str] = {}
    for name, (clients, method) in methods.items():
        write_app(
            small(name, clients, method, {"kind": "flower"}),
            network.folder / f"app-{name}",
            network.folder / f"run-{name}",
        )
        numbers[name] = network.run(network.folder / f"app-{name}")
    for name, (clients, method) in methods.items():
        remote, local = network.folder / f"run-{name}", network.folder / f"local-{name}"
        run(small(name, clients, method, {"store": "disk"}), out=local)
        network.wait_for_end(numbers[name])
        label = json.loads((remote / "results.json").read_text())["method"]
        by_client = {f"client-0{number}": site_of(network, f"client-0{number}") for number in range(clients)}
        folders = {client: site_folder(remote, site, label) for client, site in by_client.items()}
        assert same(server_memory(remote), server_memory(local)), name
        here, there = local_memories(local), site_memories(remote, by_client, label)
        assert here.keys() == there.keys(), name
        assert all(same(here[client], there[client]) for client in here), name
        assert adapters(folders) == adapters(dict.fromkeys(by_client, local)), name
        for client, folder in folders.items():
            left = {json.dumps(row) for row in json.loads((folder / "outbound.json").read_text())[client]}
            came = {json.dumps(row) for row in json.loads((remote / "outbound.json").read_text())[client]}
            assert {row for row in came if '"hello"' not in row} <= left, name


def updates(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [row for row in (json.loads(line) for line in lines if line.endswith("\n")) if row["kind"] == kind]


@contextmanager
def still(network: Network, *names: str) -> Iterator[None]:
    """Processes that stand still, with those they started."""
    groups = [network.processes[name].pid for name in names]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


@pytest.mark.slow
def test_rounds_do_not_wait_for_a_site_that_stands_still(network: Network) -> None:
    """The second site does from the first round on: three rounds are of the first site alone. Then the first one does,
    until what the second one sends late has made a round."""
    federation = {"rounds": 12, "asynchronous": {"buffer": 1}}
    wanted = small("late", 2, "fedit", {"kind": "flower"}, federation=federation)
    remote = network.folder / "run-late"
    write_app(wanted, network.folder / "app-late", remote)
    number = network.run(network.folder / "app-late")

    def rounds() -> int:
        return max((row["round"] for row in updates(remote)), default=0)

    def late() -> bool:
        rows = [row for row in updates(remote, "diagnostic") if row["client"] == "client-01"]
        return any(row["name"] == "staleness" and row["value"] >= 3 for row in rows)

    wait_for("a first round", rounds)
    with ExitStack() as second:
        second.enter_context(still(network, "node-1-executor"))
        stopped = rounds() + 1  # a reply may have been on its way
        wait_for("three more", lambda: rounds() >= stopped + 3)
        with still(network, "node-0-executor", "worker-0"):
            alone = {row["client"] for row in updates(remote) if row["round"] > stopped}
            second.close()
            wait_for("a late reply", late)
    network.wait_for_end(number)
    assert alone == {"client-00"}
    assert rounds() == 12 and not updates(remote, "failure")
    assert {row["client"] for row in updates(remote, "score")} == {"client-00", "client-01"}


def ask_doctor(network: Network, ca: Path) -> list[Finding]:
    site = site_of(network, "client-00")
    return examine(site, network.address, ca, site.parent / "keys" / "site.key")


def test_an_unknown_key_and_a_wrong_certificate_are_turned_away(network: Network) -> None:
    site = write_site(network.folder / "stranger", "client-00")
    write_site_keys(site.parent / "keys")
    network.connect("stranger", site)
    write_certificates(network.folder / "other", ["127.0.0.1"])
    network.connect("deceived", site_of(network, "client-00"), ca=network.folder / "other" / "ca.crt")
    assert not [one for one in ask_doctor(network, network.ca) if one.mend]
    (found,) = [one for one in ask_doctor(network, network.folder / "other" / "ca.crt") if one.mend]
    assert found.what == "server" and "ca.crt is another server's" in found.mend
    wait_for("the end of the stranger", lambda: network.processes["stranger"].poll() is not None)
    assert "Exit Code: 305" in network.log("stranger")
    wait_for("the complaint", lambda: "CERTIFICATE_VERIFY_FAILED" in network.log("deceived"))
    assert "SuperNode ID" not in network.log("deceived")
    network.stop("deceived")
