"""A site on which Flower's process for a message never comes up in time: befit's executor needs none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.runs.runner import run
from tests.integration.flower_network import Network
from tests.unit.flower.loopback import write_site
from tests.unit.flower.states import same, server_memory


class SlowNetwork(Network):
    """`flwr-clientapp` sleeps for ten minutes before it reports, where Flower waits for 30 s."""

    def environment(self) -> dict[str, str]:
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        slow = programs / "flwr-clientapp"
        slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
        slow.chmod(0o755)
        before = super().environment()
        return {**before, "PATH": f"{programs}:{before['PATH']}"}


@pytest.mark.slow
def test_a_slow_site_answers_with_the_executor_and_the_numbers_are_the_local_ones(tmp_path: Path) -> None:
    values = {"benchmark": {"name": "digits", "clients": 1}, "train": {"max_steps": 2}, "federation": {"rounds": 2}}
    values |= {"baselines": [], "method": "fedit", "report": {"plots": False}}
    with SlowNetwork(tmp_path) as network:
        site = write_site(tmp_path / "site-0", "client-00")
        network.register(site)
        network.connect("node-0", site, executor=True)
        keys = {"client-00": str(site.parent / "keys" / "site.pub")}
        wanted = load_experiment({**values, "engine": {"kind": "flower", "wait_s": 300, "keys": keys}})
        write_app(wanted, tmp_path / "app", tmp_path / "run")
        number = network.run(tmp_path / "app")
        network.wait_for_end(number)
        shown = network.flwr("log", number, "befit", "--show")
    local = run(load_experiment(values), out=tmp_path / "local").path
    assert same(server_memory(tmp_path / "run"), server_memory(local))
    assert "round 2 of 2: 1 of 1 clients replied" in shown and "the run is finished" in shown
