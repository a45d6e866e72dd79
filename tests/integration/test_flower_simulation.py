"""Flower's simulation runtime itself: a SuperLink, Ray, and several processes that share the clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.runs.runner import run
from tests.integration.flower_network import SimulatedNetwork
from tests.unit.flower.states import local_memories, same, server_memory
from tests.unit.flower.test_simulation import simulated_memories

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[simulation]'")


@pytest.mark.slow  # tests/unit/flower/test_simulation.py holds the app to the same numbers without Ray
def test_a_run_in_several_simulated_processes_is_the_local_run_bit_by_bit(tmp_path: Path) -> None:
    """Five clients at two processes of Ray's; which of them works for which client changes from round to round."""
    common = {
        "name": "simulated",
        "benchmark": {"name": "digits", "clients": 5},
        "train": {"max_steps": 2},
        "federation": {"rounds": 2},
        "baselines": [],
        "report": {"plots": False},
        "method": "fedsa",
    }
    out, local = tmp_path / "run", tmp_path / "local"
    write_app(load_experiment({**common, "engine": {"kind": "flower"}}), tmp_path / "app", out, simulation=True)
    with SimulatedNetwork(tmp_path) as network:
        resources = "num-supernodes=5 client-resources-num-cpus=1 init-args-num-cpus=2"
        number = network.run(tmp_path / "app", federation=resources)
        run(load_experiment({**common, "engine": {"store": "disk"}}), out=local)
        network.wait_for_end(number)
        assert "ActorPool with: 2 actors" in network.flwr("log", number, "befit", "--show")
    here, there = local_memories(local), simulated_memories(out, "fedsa")
    assert same(server_memory(out), server_memory(local))
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    scores = [json.loads((path / "results.json").read_text())["clients"] for path in (out, local)]
    assert {client: row["accuracy"] for client, row in scores[0].items()} == {
        client: row["accuracy"] for client, row in scores[1].items()
    }
