"""A federation of two shipped backbones through the kernels, with alignment on the benchmark's public records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.contract.conftest import Memo

from befit.adapters.keys import split
from befit.config import load_experiment
from befit.engine.local import LocalEngine
from befit.engine.store import ClientStore
from befit.federate import Schedule, federate
from befit.host import Host
from befit.ledger import Outbound
from befit.rela.sketch import SKETCH

METHOD = {"name": "fedmosaic", "rank": 4, "blocks": 2, "every": 1, "align": {"samples": 40}}


@pytest.fixture(scope="module")
def host() -> Host:
    settings = {
        "name": "mixed", "benchmark": {"name": "skills", "clients": 4},
        "model": {"id": "skills-llama", "max_length": 96}, "adapter": {"targets": ["q_proj", "down_proj"]},
        "families": {"small": {"clients": ["reverse.upper", "star-vowels.reverse"], "model": {"id": "skills-llama-s"}}},
        "method": METHOD, "baselines": [], "train": {"max_steps": 2, "batch_size": 2}, "federation": {"rounds": 2},
        "evaluate": {"metrics": ["token_accuracy"]},
    }  # fmt: skip
    return Host(load_experiment(settings))


@pytest.mark.parametrize("serialise", [False, True])
def test_clients_with_two_backbones_learn_from_each_other(host: Host, serialise: bool, tmp_path: Path) -> None:
    """Both see gradients of one small model, get cores of both, and the larger backbone its basis once."""
    method = host.build(METHOD)
    site = host.install(method)
    store, memo = ClientStore(None if not serialise else tmp_path / "state", resident=not serialise), Memo()
    memo.spool = tmp_path / "spool"
    engine = LocalEngine(method, host.infos, host.site, store, Outbound(), serialise=serialise)
    server = federate(method, engine, site, Schedule(2, 0), memo)
    assert len(memo.updates) == 8 and len(memo.scores) == 4 and not memo.failures
    d_out, d_in = host.smallest.model.shapes.last
    shapes = {tuple(update.payload.arrays[SKETCH].shape) for _, update in memo.updates}
    assert shapes == {(int(0.4 * d_out * d_in),)} and server.arrays[SKETCH].shape[0] == 4
    assert server.arrays["own/0.q_proj/P"].shape == (4, 4, 4)
    large = next(info for info in host.infos if info.backbone != host.smallest.key)
    memory = store.load(large.id)
    assert memory is not None
    basis = {key: value for key, value in memory.arrays.items() if split(key)[0] == "basis"}
    start = site.starts[large.backbone]
    assert len(basis) == 8 and not any(torch.equal(value, start[key]) for key, value in basis.items())
    if not serialise:
        return
    mixture = method.dispatch(server, large, memo.updates[-1][0]).arrays
    weights = server.arrays["relevance/clients/weights"]
    clients = sorted(info.id for info in host.infos)
    last = {update.client.id: update.payload.arrays for at, update in memo.updates if at.round == 2}
    key = "block.03.q_proj/P"
    expected = sum(float(weights[clients.index(large.id), place]) * last[client][f"personal/{key}"]
                   for place, client in enumerate(clients))  # fmt: skip
    torch.testing.assert_close(mixture[f"shared/{key}"], expected)
