"""Methods that distil on public records, from a configuration to clients' models: in worker processes, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from befit.core.errors import ConfigError
from befit.runs.runner import check, run
from tests.integration.test_processes import config, traces
from tests.processes import fork_workers
from tests.unit.models.tiny_models import save_vit

METHODS = ("fedmkt", "perada", "takfl")


def test_two_processes_give_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public records are drawn and learnt alike by the server and by clients in processes of their own."""
    fork_workers(monkeypatch)
    method = {"name": "fedmkt", "rank": 2, "distil": {"samples": 4}}
    more: dict[str, Any] = {"method": method, "federation": {"rounds": 2}, "evaluate": {}}
    found = [traces(run(config(workers, **more), out=tmp_path / str(workers)).path) for workers in (1, 2)]
    assert found[0] == found[1]
    assert len([name for name in found[0] if name.endswith("deployment.safetensors")]) == 3
    results = json.loads((tmp_path / "1" / "results.json").read_text())
    assert not results["failures"]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backbones", [1, 2])
def test_two_processes_give_the_bits_of_one_for_every_distillation(name: str, backbones: int, tmp_path: Path) -> None:
    """The server learns in the first process from what workers send, on one backbone and across two."""
    more: dict[str, Any] = {
        "method": {"name": name, "rank": 2, "distil": {"samples": 4}},
        "federation": {"rounds": 2},
        "evaluate": {},
    }
    if backbones == 2:
        small = save_vit(tmp_path / "vit", labels=10)
        more["families"] = {"small": {"clients": ["client-02"], "model": {"id": str(small)}}}
    found = [traces(run(config(workers, **more), out=tmp_path / str(workers)).path) for workers in (1, 2)]
    assert found[0] == found[1]
    assert not json.loads((tmp_path / "2" / "results.json").read_text())["failures"]


@pytest.mark.parametrize("name", METHODS)
def test_without_public_records_a_check_refuses_the_run(name: str, tmp_path: Path) -> None:
    clients = {}
    for client in ("north", "south"):
        clients[client] = tmp_path / f"{client}.jsonl"
        rows = [{"text": f"good {number}", "label": "ab"[number % 2]} for number in range(20)]
        clients[client].write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model": {"id": "names-bert-fl"},
        "data": {"task": "text-classification", "clients": {k: str(v) for k, v in clients.items()}},
        "method": name,
    }
    with pytest.raises(ConfigError, match=f"method {name}: needs public records, and .* has none"):
        check(settings)
