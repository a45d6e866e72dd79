"""The app of Flower's simulation runtime, without the runtime: all clients of one machine, each a site of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from befit.config.experiment import Experiment, to_yaml
from befit.config.load import load_experiment
from befit.core.errors import BefitError, ConfigError
from befit.flower.app_folder import write_app
from befit.flower.server_app import run_over
from befit.flower.simulation import simulated_app
from befit.protocol.store import read_payload
from befit.runs.runner import run
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import adapters, local_memories, same, server_memory
from tests.unit.models.tiny_models import save_vit

Make = Callable[..., Experiment]


class SimulatedGrid(LoopbackGrid):
    """Nodes with numbers instead of files, as the simulation runtime makes them."""

    def __init__(self, config: Path, out: Path, count: int, first: int = 11) -> None:
        super().__init__([config] * count, first)
        self.app, self.first, self.settings = simulated_app(config), first, {"out": str(out)}

    def answer(self, message: Message, node: int) -> Message:
        place = {"partition-id": node - self.first, "num-partitions": len(self.sites)}
        return self.app(message, Context(1, node, place, RecordDict(), self.settings))


def simulated_memories(out: Path, label: str) -> dict[str, object]:
    found = {}
    for folder in sorted(out.with_name(f"{out.name}-sites").glob(f"*/runs/*/{label}")):
        held = json.loads((folder / "stamp.json").read_text())
        found[folder.parents[2].name] = read_payload(folder / held["files"]["after"])
    return found


def write(experiment: Experiment, path: Path) -> Path:
    path.write_text(to_yaml(experiment))
    return path


def test_a_simulated_run_is_the_local_run_bit_by_bit(experiment: Make, tmp_path: Path) -> None:
    """Three clients and two methods, one after the other, from one backbone."""
    more = {"benchmark": {"name": "digits", "clients": 3}, "baselines": ["local"]}
    remote, out = experiment("fedsa", **more), tmp_path / "remote"
    grid = SimulatedGrid(write(remote, tmp_path / "experiment.yaml"), out, 3)
    run_over(grid, remote, out, pinned=False, poll_s=0.01)
    local = run(experiment("fedsa", {"store": "disk"}, **more), out=tmp_path / "local").path
    here, there = local_memories(local), simulated_memories(out, "fedsa")
    assert same(server_memory(out), server_memory(local))
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    (one,) = {path.parent.name for path in out.with_name("remote-sites").glob("*/runs/*/fedsa")}
    folders = {client: out.with_name("remote-sites") / client / "runs" / one / "fedsa" for client in here}
    assert adapters(folders) == adapters(dict.fromkeys(here, local))
    assert all((folder / "outbound.json").exists() for folder in folders.values())


def test_a_resumed_simulation_finds_its_clients_at_other_nodes(experiment: Make, tmp_path: Path) -> None:
    """The runtime numbers its nodes anew for every run; what a client keeps goes by its id."""
    more = {"federation": {"rounds": 3}}
    remote, out = experiment("fedsa", **more), tmp_path / "remote"
    config = write(remote, tmp_path / "experiment.yaml")
    grid = SimulatedGrid(config, out, 2)
    grid.tamper = lambda reply, node: None if len(grid.sent) > 6 else reply
    quick = experiment("fedsa", {"kind": "flower", "deadline_s": 0.2}, **more)
    with pytest.raises(BefitError):
        run_over(grid, quick, out, pinned=False, poll_s=0.01)
    assert not (out / "results.json").exists()
    run_over(SimulatedGrid(config, out, 2, first=101), quick, out, resume=True, pinned=False, poll_s=0.01)
    local = run(experiment("fedsa", {"store": "disk"}, **more), out=tmp_path / "local").path
    here, there = local_memories(local), simulated_memories(out, "fedsa")
    assert same(server_memory(out), server_memory(local))
    assert all(same(here[client], there[client]) for client in here)


def test_another_number_of_nodes_than_of_clients_is_refused_at_once(experiment: Make, tmp_path: Path) -> None:
    """A run with two nodes for three clients would wait for the third until engine.wait_s."""
    remote = experiment("fedsa", benchmark={"name": "digits", "clients": 3})
    grid = SimulatedGrid(write(remote, tmp_path / "experiment.yaml"), tmp_path / "remote", 2)
    with pytest.raises(ConfigError, match="num-supernodes=3"):
        run_over(grid, remote, tmp_path / "remote", pinned=False, poll_s=0.01)


def test_a_process_of_a_simulation_holds_the_backbone_of_every_family(experiment: Make, tmp_path: Path) -> None:
    """Clients of two models in turns, each in its own; the last benchmark's data is the same for both."""
    narrow = save_vit(tmp_path / "narrow", labels=10)
    families = {"narrow": {"clients": ["client-01"], "model": {"id": str(narrow)}}}
    more = {"benchmark": {"name": "digits", "clients": 3}, "families": families}
    remote, out = experiment("fedsa", **more), tmp_path / "remote"
    run_over(SimulatedGrid(write(remote, tmp_path / "experiment.yaml"), out, 3), remote, out, pinned=False, poll_s=0.01)
    local = run(experiment("fedsa", {"store": "disk"}, **more), out=tmp_path / "local").path
    here, there = local_memories(local), simulated_memories(out, "fedsa")
    assert same(server_memory(out), server_memory(local))
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)


def test_a_simulated_app_knows_every_client_of_a_folder(tmp_path: Path) -> None:
    """`data.clients` may be a folder here, and labels are collected, since the data is on this machine."""
    for client in ("north", "south"):
        lines = [json.dumps({"text": f"word {number}", "label": "ab"[number % 2]}) for number in range(20)]
        (tmp_path / "data" / client).mkdir(parents=True)
        (tmp_path / "data" / client / "train.jsonl").write_text("\n".join(lines))
        (tmp_path / "data" / client / "test.jsonl").write_text("\n".join(lines))
    data = {"clients": str(tmp_path / "data"), "task": "text-classification"}
    values = {
        "name": "own",
        "model": {"id": "names-bert-fl"},
        "data": data,
        "method": "fedit",
        "engine": {"kind": "flower"},
    }
    clients = write_app(load_experiment(values), tmp_path / "app", tmp_path / "run", simulation=True)
    held = load_experiment(tmp_path / "app" / "befit_app" / "experiment.yaml")
    assert clients == ["north", "south"] and held.data is not None and held.data.label_names == ["a", "b"]
    assert held.data.clients == {client: str(tmp_path / "data" / client) for client in clients}
    assert "simulated_app" in (tmp_path / "app" / "befit_app" / "client_app.py").read_text()
    readme = (tmp_path / "app" / "README.md").read_text()
    assert "num-supernodes=2" in readme and "- `north`" in readme and "@" not in readme
