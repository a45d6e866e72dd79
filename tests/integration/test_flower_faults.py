"""What faults cost: nothing that was aggregated, and a reply for each that was lost; benchmarks/faults.py measures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from befit.config.experiment import Experiment, to_yaml
from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.flower.doctor_server import server_seen
from befit.flower.keys import write_certificates, write_site_keys
from befit.flower.server_app import run_over
from befit.merge.merge import Merge
from befit.runs.runner import run
from tests.integration.flower_network import Network, wait_for
from tests.processes import begin
from tests.unit.flower.faulty import FaultyGrid
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import same, server_memory


def small(engine: dict[str, Any], clients: int = 2, **federation: Any) -> Experiment:
    values = {"benchmark": {"name": "digits", "clients": clients}, "train": {"max_steps": 2}, "method": "fedit"}
    report = {"report": {"plots": False}}
    return load_experiment(
        {**values, "name": "small", "baselines": [], "federation": federation, "engine": engine, **report}
    )


def sites_of(folder: Path, clients: int = 2) -> list[Path]:
    return [write_site(folder / f"site-{number}", f"client-0{number}") for number in range(clients)]


def killed_while_it_aggregates(folder: Path) -> None:
    """A server that gets no further than the middle of its second aggregation."""
    aggregate, calls = Merge.__call__, []

    def kill(self: Merge, *what: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return aggregate(self, *what, **how)

    Merge.__call__ = kill  # type: ignore[method-assign]
    run_over(LoopbackGrid(sites_of(folder)), small({"kind": "flower"}, rounds=3), folder / "run", poll_s=0.01)


@pytest.mark.slow
def test_a_server_killed_while_it_aggregates_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Round 1 is whole; in round 2 the sites give the same replies again and train nothing."""
    process = begin(killed_while_it_aggregates, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_text())["round"] == 1
    grid = LoopbackGrid(sites_of(tmp_path))
    done = run_over(grid, small({"kind": "flower"}, rounds=3), tmp_path / "run", resume=True, poll_s=0.01)
    local = run(small({"store": "disk"}, rounds=3), out=tmp_path / "local")
    assert same(server_memory(done.path), server_memory(local.path)) and not done.results["failures"]
    stamp = json.loads(next(tmp_path.glob("site-0/state/runs/*/fedit/stamp.json")).read_text())
    assert stamp["number"] == 3  # trainings


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["away", "late"])
def test_sites_that_drop_out_cost_their_replies_and_no_round(fault: str, tmp_path: Path) -> None:
    """30 % of ten sites in each of ten rounds: what was not left out was aggregated, and all are scored in the end."""
    wanted = small(
        {"kind": "flower", "wait_s": 30, "deadline_s": 0.1 if fault == "late" else 600}, 10, rounds=10, min_replies=1
    )
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(wanted))
    grid = FaultyGrid(config, tmp_path / "run", 10, fault, seed=0)
    done = run_over(grid, wanted, tmp_path / "run", pinned=False, observer=grid.draw, poll_s=0.01)
    used = sum(row["updates"] for row in done.results["clients"].values())
    left_out = done.results["failures"]
    assert {one["kind"] for one in left_out} == {"offline" if fault == "away" else "late"}
    assert 10 < len(left_out) < 50 and used + len(left_out) == 100
    assert done.results["summary"]["scored"] == 10


@pytest.mark.slow
def test_a_server_app_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Over a real SuperLink with keys: killed between a site's reply and the end of its round."""
    with Network(tmp_path) as network:
        sites = sites_of(tmp_path)
        for number, site in enumerate(sites):
            network.register(site)
            network.start(f"worker-{number}", ["python", "-m", "befit", "worker", site])
            network.connect(f"node-{number}", site)
        keys = {f"client-0{number}": str(site.parent / "keys" / "site.pub") for number, site in enumerate(sites)}
        write_app(small({"kind": "flower", "keys": keys}, rounds=3), tmp_path / "app", tmp_path / "run")
        first = network.run(tmp_path / "app")
        stamps = list[Path]()

        def replied() -> bool:
            stamps[:] = tmp_path.glob("site-1/state/runs/*/fedit/stamp.json")
            return bool(stamps)

        wait_for("a reply", replied)
        killed = programs("flwr-serverapp", network.address)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert killed
        network.flwr("stop", first, "befit")
        network.wait_for_end(network.run(tmp_path / "app", "resume=true"))
    local = run(small({"store": "disk"}, rounds=3), out=tmp_path / "local")
    assert same(server_memory(tmp_path / "run"), server_memory(local.path))


def programs(name: str, address: str) -> list[int]:
    """Processes of a program that name the SuperLink at this address; Flower starts them in groups of their own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(Path(word).name == name for word in words[:2]) and any(address in word for word in words):
                found.append(int(place.name))
        except OSError:
            continue
    return found


class Expired(Network):
    """A SuperLink whose certificate has expired."""

    def secure(self) -> str:
        write_certificates(self.ca.parent, ["localhost", "127.0.0.1"], days=0.0)
        return f'root-certificates = "{self.ca}"'

    def healthy(self) -> bool:
        try:
            return httpx.get(f"https://{self.address}/health", verify=False).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.mark.slow
def test_nobody_connects_to_an_expired_certificate_and_the_doctor_says_so(tmp_path: Path) -> None:
    with Expired(tmp_path) as network:
        (site,) = sites_of(tmp_path, 1)
        write_site_keys(site.parent / "keys")
        network.connect("node-0", site)
        wait_for("the complaint", lambda: "certificate has expired" in network.log("node-0"))
        assert "SuperNode ID" not in network.log("node-0")
        mends = [one.mend for one in server_seen(network.address, network.ca) if one.mend]
    assert len(mends) == 2 and all(
        "expired" in mend and "befit flower certificates 127.0.0.1" in mend for mend in mends
    )
