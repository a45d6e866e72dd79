"""Hostile sites and servers over a real SuperLink, with TLS and keys: the lies that are played in process elsewhere.

Also what Flower lets happen and docs/security.md warns of: whoever reaches its port can start a run, with any code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.text import readable
from befit.flower.app_folder import write_app
from befit.flower.checklist import NOT, checked
from befit.flower.server_app import run_over
from tests.integration.flower_network import Network, wait_for
from tests.integration.hostile_server import CHOSEN, SERVER
from tests.integration.hostile_site import LABEL, SCORE, TRAIN
from tests.security.requests import CLIENT
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import same, server_memory

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HONEST, LIAR = "client-00", "client-01"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("federation")) as network:
        yield network


def experiment(**engine: float) -> Experiment:
    return load_experiment(
        {
            "name": "hostile",
            "benchmark": {"name": "digits", "clients": 2},
            "train": {"max_steps": 2},
            "federation": {"rounds": len(TRAIN)},
            "evaluate": {"every": 1},
            "baselines": [],
            "report": {"plots": False},
            "method": LABEL,
            "engine": {"kind": "flower", **engine},
        }
    )


def connect(network: Network, name: str, client: str, worker: str = "befit worker") -> Path:
    """A new site, with a key and a worker: befit's, or one that lies."""
    site = write_site(network.folder / name, client)
    network.start(f"worker-{name}", ["python", "-m", *worker.split(), site], ROOT)
    wait_for(f"the worker of {name}", (site.parent / "state" / "worker.json").exists)
    network.register(site)
    network.connect(f"node-{name}", site)
    return site


def disconnect(network: Network, name: str) -> None:
    network.stop(f"node-{name}")
    network.stop(f"worker-{name}")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_site_that_lies_in_every_round_changes_no_number_of_the_others(network: Network) -> None:
    """Those are the numbers of a run in which the liar never comes, bit by bit."""
    connect(network, "honest", HONEST)
    connect(network, "liar", LIAR, "tests.integration.hostile_site")
    lied = network.folder / "lied"
    write_app(experiment(), network.folder / "app-lied", lied)
    network.wait_for_end(network.run(network.folder / "app-lied"))

    told = network.log("worker-liar").splitlines()
    assert sorted(told) == sorted(
        f"{number}: {lie}" for lies in (TRAIN, SCORE) for number, lie in enumerate(lies, start=1)
    )
    failures = [line for line in lines_of(lied) if line["kind"] == "failure"]
    assert len(failures) == len(told) == 20 and {line["client"] for line in failures} == {LIAR}
    assert [line["reason"] for line in failures] == [readable(line["reason"]) for line in failures]
    assert json.loads((lied / "results.json").read_text())["status"] == "complete"

    alone = network.folder / "alone"
    grid = LoopbackGrid([write_site(network.folder / "again", HONEST)])
    run_over(grid, experiment(wait_s=0.1), alone, poll_s=0.01)
    ours, theirs = ([line for line in lines_of(run) if line["client"] == HONEST] for run in (lied, alone))
    assert ours and ours == theirs
    assert same(server_memory(lied), server_memory(alone))
    disconnect(network, "honest")
    disconnect(network, "liar")


def test_a_site_refuses_what_no_server_should_send(network: Network) -> None:
    """The run that it began goes on after it, and nothing of the site is written but for that."""
    site = connect(network, "asked", CLIENT)
    app, out = network.folder / "app-hostile", network.folder / "said.json"
    write_app(experiment(), app, network.folder / "unused")
    (app / "befit_app" / "server_app.py").write_text(SERVER.format(root=str(ROOT), out=str(out)))
    network.wait_for_end(network.run(app))
    hello, first, *refused, second = json.loads(out.read_text())
    assert (hello["kind"], first["kind"], second["kind"]) == ("hello", "update", "update")
    assert len(refused) == len(CHOSEN) == 20
    for case, said in zip(CHOSEN, refused, strict=True):
        assert said["kind"] == "failure" and not said["arrays"], case.name
        assert case.reason in said["reason"], (case.name, said["reason"])
    assert [path.name for path in (site.parent / "state" / "runs").iterdir()] == ["honest"]
    disconnect(network, "asked")


def test_who_reaches_flowers_port_may_control_it_and_the_checklist_says_so(network: Network) -> None:
    """No test here has shown anybody who it is before it registered keys and started runs. Where Flower begins to ask,
    this fails: then docs/security.md has to say so."""
    site = write_site(network.folder / "looks", HONEST)
    points = checked([], site, None, network.address, network.ca, servers=False)
    (way_in,) = [point for point in points if point.point == "way in"]
    assert way_in.status == NOT and "405" in way_in.found
