"""docs/flower.md as a reader follows it, on one machine: its first commands, and the services that are written."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from befit.config.load import load_experiment
from befit.core.yamlfile import read_yaml, write_yaml
from befit.flower.consortium import load_consortium
from befit.flower.consortium_folder import write_consortium
from befit.runs.runner import run
from tests.integration.flower_network import BIN, FLAGS, Network, free_ports, wait_for
from tests.pages import blocks
from tests.processes import PATIENCE
from tests.unit.flower.states import adapters
from tests.unit.flower.test_consortium import unit

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"
LABELS = {"fedsa": "", "local": "baselines/local"}


def quick(source: Path, rounds: int = 1) -> int:
    """Give a consortium free ports and few rounds; returns the server's port."""
    values = read_yaml(source)
    values["run"] |= {"federation": {"rounds": rounds}, "train": {"max_steps": 2}}
    source.write_text(write_yaml(values))
    return free_ports(source)


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, **FLAGS, "PATH": f"{BIN}:{os.environ['PATH']}"}


def check_adapters(out: Path, local: Path) -> None:
    """Every site's adapters are, to the bit, those of a local run of the same configuration."""
    wanted = load_experiment(out / "app" / "befit_app" / "experiment.yaml", ["engine={store: disk}"])
    run(wanted, out=local)
    clients = [folder.name for folder in (out / "sites").iterdir()]
    assert len(clients) == 3
    for label, place in LABELS.items():
        there = {}
        for client in clients:
            (there[client],) = (out / "sites" / client / "state" / "runs").glob(f"*/{label}")
        assert adapters(there) == adapters(dict.fromkeys(clients, local / place)), label


def is_open(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_the_first_commands_of_the_page_lead_to_the_local_runs_numbers(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    install, *commands = blocks(PAGE)[1][1].splitlines()
    assert install.startswith("pip install")
    for command in commands:
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if command == "befit flower init":
            port = quick(tmp_path / "consortium.yaml")
    assert "3 of 3 clients replied" in done.stdout and "the run is finished" in done.stdout
    assert not is_open(port)
    check_adapters(tmp_path / "federation", tmp_path / "local")


@pytest.fixture
def federation(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    source = tmp_path / "consortium.yaml"
    run_ = "{benchmark: {name: digits, clients: 3}, method: fedsa}"
    source.write_text(f"sites: {{client-00: , client-01: , client-02: }}\nrun: {run_}\n")
    quick(source, getattr(request, "param", 1))
    write_consortium(load_consortium(source), tmp_path / "federation")
    return tmp_path / "federation"


@pytest.mark.slow
@pytest.mark.parametrize("federation", [50], indirect=True, ids=["a run that does not end before"])
def test_one_site_stops_and_starts_and_ctrl_c_ends_all(federation: Path, environment: dict[str, str]) -> None:
    port = read_yaml(federation.parent / "consortium.yaml")["server"]["port"]
    said = federation.parent / "said.txt"
    command = federation / "run-here.sh"
    with said.open("w") as errors:
        script = subprocess.Popen([command], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    log, announced = federation / "here" / "logs" / "run.log", federation / "sites" / "client-02" / "state"
    wait_for("the server", lambda: log.exists() and " of 3 sites are here" in log.read_text())
    for verb, word, workers in (("stop", "stopped", 0), ("start", "started", 1)):
        subprocess.run([command, verb, "client-02"], check=True)
        wait_for(word, lambda word=word: f"client-02 is {word}" in said.read_text())
        wait_for("its worker", lambda n=workers: len(list(announced.rglob("worker.json"))) == n)
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=PATIENCE)
    assert script.returncode == 130 and not is_open(port)
    assert (federation / "here" / "logs" / "executor-client-02.log").exists()
    assert not [path for path in federation.rglob("worker.json")]  # which a worker removes that ends as it should


@pytest.mark.slow
def test_the_services_that_are_written_carry_a_run(federation: Path, environment: dict[str, str]) -> None:
    """Each unit's command in its folder, as systemd starts it; the sites' keys by register.sh; the run."""

    class Services(Network):
        def secure(self) -> str:
            return ""

    (network_folder := federation.parent / "network").mkdir()
    network = Services(network_folder)
    network.port = read_yaml(federation.parent / "consortium.yaml")["server"]["port"]
    network.address, network.ca = f"127.0.0.1:{network.port}", federation / "server" / "certificates" / "ca.crt"
    here = {**environment, "FLWR_HOME": str(federation / "server" / "flwr")}

    def start(path: Path) -> None:
        folder, (program, *rest) = unit(path)
        network.start(f"{Path(folder).name}-{path.stem}", [Path(program).name, *rest], Path(folder))

    try:
        start(federation / "server" / "befit-superlink.service")
        wait_for("a healthy SuperLink", network.healthy)
        subprocess.run([federation / "server" / "register.sh"], env=here, check=True)
        for path in (federation / "sites").rglob("*.service"):
            start(path)
        done = subprocess.run(
            ["flwr", "run", "app", "befit", "--stream"],
            cwd=federation,
            env=here,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert "the run is finished" in done.stdout, done.stdout + done.stderr
    finally:
        network.__exit__()
    (path,) = (federation / "runs").glob("*/results.json")
    assert json.loads(path.read_text())["status"] == "complete"
    check_adapters(federation, federation.parent / "local")
