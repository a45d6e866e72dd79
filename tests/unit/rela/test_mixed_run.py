"""A federation of two shipped backbones through the kernels, with alignment on the benchmark's public records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.contract.conftest import Memo

from befit.adapters.keys import split
from befit.config import load_experiment
from befit.engine.local import LocalEngine
from befit.engine.store import ClientStore
from befit.errors import ConfigError, RunError
from befit.federate import Schedule, federate
from befit.host import Host
from befit.ledger import Outbound
from befit.rela.sketch import SKETCH, Sketch, last_gradient
from befit.runner import run
from befit.types import Tick

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


COMMON = {
    "name": "common", "benchmark": {"name": "skills", "clients": 2}, "model": {"id": "skills-llama", "max_length": 96},
    "adapter": {"targets": ["q_proj", "down_proj"]}, "method": {"name": "rela", "rank": 4, "every": 1, "noise": 0.0},
    "baselines": [], "train": {"max_steps": 2, "batch_size": 2}, "federation": {"rounds": 1},
    "evaluate": {"metrics": ["token_accuracy"], "newcomers": False},
}  # fmt: skip


def test_data_are_compared_by_a_model_that_no_client_trains(tmp_path: Path) -> None:
    """Clients send the common model's gradient at their batches, and a run does not go on with another model."""
    settings = {**COMMON, "common_model": {"id": "skills-llama-s"}}
    experiment = load_experiment(settings)
    assert experiment.common_model is not None and experiment.common_model.max_length == 96, "as under model"
    host = Host(experiment)
    assert host.smallest.fingerprint not in {one.fingerprint for one in host.backbones.values()}
    assert host.smallest.model.shapes.last != load_host().smallest.model.shapes.last
    done = run(settings, out=tmp_path / "run", host=host)
    method, site, (info, _) = host.build(experiment.method), host.install(host.build(experiment.method)), host.infos
    at, client = Tick("federate", 1, 0, 0), host.site(info)
    indices = list(client.indices("train", 2, at))
    small = host.examples(info.id, "train", host.smallest)
    whole = torch.stack([last_gradient(host.smallest, small.batch(one)) for one in indices]).mean(0)
    received = method.dispatch(method.server_init(site), info, at)
    _, reply = method.client_update(method.client_init(client), received, client, at)
    torch.testing.assert_close(reply.arrays[SKETCH], Sketch().take(whole, 0))
    (done.path / "report.html").unlink()
    basis = json.loads((done.path / "run.json").read_text())
    (done.path / "run.json").write_text(json.dumps({**basis, "common_model": "0" * 64}))
    with pytest.raises(RunError, match="common_model changed"):
        run(settings, out=tmp_path / "run", resume=True, host=host)


def load_host(**more: object) -> Host:
    return Host(load_experiment({**COMMON, **more}))


def test_a_common_model_that_a_family_has_is_not_loaded_twice() -> None:
    host = load_host(common_model={"id": "skills-llama"})
    assert host.smallest is next(iter(host.backbones.values()))


def test_a_common_model_without_a_name_or_on_flower_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"common_model\.id: is required"):
        load_experiment({**COMMON, "common_model": {"dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"common_model\.max_length: must be positive"):
        load_experiment({**COMMON, "common_model": {"id": "skills-llama-s", "max_length": 0}})
    with pytest.raises(ConfigError, match="common_model: cannot be used on Flower"):
        load_experiment({**COMMON, "common_model": {"id": "skills-llama-s"}, "engine": {"kind": "flower"}})
