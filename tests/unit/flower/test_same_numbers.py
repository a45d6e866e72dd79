"""The engine over Flower's records gives the local engine's numbers, bit by bit, for every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import adapters, local_memories, same, server_memory, site_folder, site_memories

from befit.config import Experiment
from befit.flower.server_app import run_over
from befit.registry import method_names
from befit.runner import run


@pytest.mark.parametrize("method", method_names())
def test_a_run_at_sites_is_the_local_run_bit_by_bit(
    method: str, grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    remote = run_over(grid, experiment(method), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment(method, {"store": "disk"}), out=tmp_path / "local").path
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    assert same(server_memory(remote), server_memory(local))
    here, there = local_memories(local), site_memories(remote, by_client, method)
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    assert adapters({client: site_folder(remote, site, method) for client, site in by_client.items()}) == adapters(
        {client: local / "clients" / client for client in by_client}
    )
    scores = [json.loads((path / "results.json").read_text())["clients"] for path in (remote, local)]
    for client in by_client:
        assert scores[0][client]["accuracy"] == scores[1][client]["accuracy"]


def test_numbers_are_the_same_in_bfloat16(
    grid: LoopbackGrid, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """The wire rounds to 8 bits of mantissa on both engines alike, and the frame keeps bfloat16 as it is."""
    wire: dict[str, Any] = {"wire": {"dtype": "bfloat16"}}
    remote = run_over(grid, experiment("fedit", **wire), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("fedit", {"store": "disk"}, **wire), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    up = [sum(line["bytes_up"] for line in map(json.loads, (path / "ledger.jsonl").read_text().splitlines()))
          for path in (remote, local)]  # fmt: skip
    assert up[0] == up[1]
