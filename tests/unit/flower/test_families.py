"""Sites with backbones of several sizes: their numbers are those of one machine, and a site holds its own family's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, NotEnoughReplies
from befit.flower.policy import settings_of
from befit.flower.server_app import run_over
from befit.runs.loading import load_federation
from befit.runs.runner import run
from tests.contract.conftest import LITTLE
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import adapters, local_memories, same, server_memory, site_folder, site_memories

LARGE, SMALL = "digits-llava-l", "digits-llava-s"


def hetero(method: str, engine: dict[str, Any], **more: Any) -> Experiment:
    values = {
        "benchmark": "digits-vqa-hetero",
        "limit": {"clients": 1, "records": 2},
        "method": {"name": method, **LITTLE.get(method, {})},
        "train": {"max_steps": 2, "batch_size": 2},
        "federation": {"rounds": 2},
        "evaluate": {"newcomers": False, "max_new_tokens": 2},
        "checkpoint": {"every_s": 0},
        "report": {"plots": False},
        "engine": engine,
        **more,
    }
    return load_experiment(values)


def sites_of(experiment: Experiment, folder: Path, extra: tuple[str, ...] = ()) -> dict[str, Path]:
    """A site's file for each client, which lists its own family's model and no other but `extra`."""
    sites: dict[str, Path] = {}
    for client in load_federation(experiment).clients:
        model = SMALL if client.info["size"] == "small" else LARGE
        path = sites[client.id] = folder / client.id / "site.yaml"
        path.parent.mkdir()
        models = json.dumps({name: name for name in (model, *extra)})
        path.write_text(
            f"client: {client.id}\nmodels: {models}\nbenchmarks: [digits-vqa-hetero]\n"
            "limits: {min_records: 1}\nshares: [personal, sketch]\n"
        )
    return sites


@pytest.mark.parametrize("method", ["fedit", "potara", "perada", "fedmkt", "rela", "fedmosaic"])
def test_a_run_of_two_families_at_sites_is_the_local_run_bit_by_bit(method: str, tmp_path: Path) -> None:
    """The server has every family's memory; where methods let families teach each other it runs their backbones."""
    distant = hetero(method, {"kind": "flower"})
    relevance = method in ("rela", "fedmosaic")  # clients compare gradients of the smallest backbone, which they need
    sites = sites_of(distant, tmp_path, extra=(SMALL,) if relevance else ())
    assert len(sites) == 2
    remote = run_over(LoopbackGrid(sites.values()), distant, tmp_path / "remote", poll_s=0.01).path
    local = run(hetero(method, {"store": "disk"}), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    here, there = local_memories(local), site_memories(remote, sites, method)
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    assert adapters({client: site_folder(remote, site, method) for client, site in sites.items()}) == adapters(
        {client: local / "clients" / client for client in sites}
    )
    rows = [json.loads((path / "results.json").read_text())["clients"] for path in (remote, local)]
    assert not json.loads((remote / "results.json").read_text())["failures"]
    for client in sites:
        assert rows[0][client]["exact_match"] == rows[1][client]["exact_match"]
        assert rows[0][client].get("weights") == rows[1][client].get("weights")
