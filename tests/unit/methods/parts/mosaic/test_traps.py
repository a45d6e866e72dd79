"""Traps of an implementation of FedMosaic that no other file is about, and whose gradients come out alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, select, slot, slot_of
from befit.adapters.model import AdaptedModel
from befit.adapters.pq import BASIS
from befit.config.load import load_experiment
from befit.core.seeds import derive_seed
from befit.core.values import Payload, State, Tick
from befit.methods.parts.mosaic.bank import EVERYBODY, GROUPS, WEIGHTS, absorb
from befit.methods.parts.mosaic.sketch import SKETCH
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.tasks.base import Examples
from tests.federation import SMALL, Federation
from tests.tiny import assert_near, assert_same, federated, make_site, tiny_model
from tests.unit.methods.parts.mosaic.families import start

AT = Tick("federate", 1, 1, 0)
BRANCHES: dict[str, dict[str, Any]] = {"feddat": {}, "fedmosaic": {"mixing": "equal", "blocks": 1}}


def one_round(name: str, checkpointing: bool) -> tuple[State, int]:
    """What a client has and sends after a round that began with a random download, and how often a module ran."""
    method = build_method({"name": name, "rank": 2, **BRANCHES[name]})
    backbone: Any = tiny_model("llama")
    if checkpointing:
        backbone.activation_checkpointing_enable({"use_reentrant": False})
    site = make_site("llama", method.layout, model=AdaptedModel(backbone, "all", head=False))
    server = ServerSite({site.info.backbone: site.model.dump(EVERYTHING)}, (site.info,))
    received = federated(method).dispatch(method.server_init(server), site.info, AT)
    arrays = {
        key: torch.randn(value.shape, generator=torch.Generator().manual_seed(derive_seed(key))) / 4
        for key, value in site.model.dump(slot("shared")).items()
    }
    ran = 0

    def count(*_: object) -> None:
        nonlocal ran
        ran += 1

    next(
        module for module in backbone.modules() if type(module).__name__ == "LlamaAttention"
    ).register_forward_pre_hook(count)
    stage = method.plan()[0]
    memory, reply = finish(
        stage.exchange.client_update(
            method.client_init(site), replace(received, arrays={**received.arrays, **arrays}), site, AT
        )
    )
    return {**memory.arrays, **{f"reply:{key}": value for key, value in reply.arrays.items()}}, ran


@pytest.mark.parametrize("name", list(BRANCHES))
def test_two_branches_under_gradient_checkpointing_train_as_without(name: str) -> None:
    """A block that is run again in the backward pass sees the slots of its own forward pass, not the last ones."""
    plain, ran = one_round(name, False)
    again, more = one_round(name, True)
    assert more > ran
    assert_near(again, plain, rtol=1e-3, atol=1e-5)


def test_a_server_mixes_what_came_in_bfloat16_in_float32() -> None:
    federation = start("rela", mixing="equal")
    updates = federation.round(1)
    narrow = [
        replace(one, payload=Payload({key: value.bfloat16() for key, value in one.payload.arrays.items()}))
        for one in updates.values()
    ]
    server = federated(federation.method).aggregate(
        start("rela", mixing="equal").server, narrow, federation.server_site, AT
    )
    key = "block.00.q_proj/A"
    sent = [one.payload.arrays[f"personal/{key}"] for one in narrow if one.client.id in "ce"]
    found = federated(federation.method).dispatch(server, federation.info("a"), AT).arrays[f"shared/{key}"]
    torch.testing.assert_close(found.double(), (sent[0].double() + sent[1].double()) / 2, rtol=1e-6, atol=1e-8)
    stacks, _ = absorb(start("rela", mixing="equal").server, narrow)
    assert {stack.dtype for own in stacks.values() for stack in own.values()} == {torch.float32}


def test_weight_decay_and_optimiser_leave_frozen_factors_alone() -> None:
    """With a decay of one half, what is frozen stays to the bit, and the optimiser's averages are of nothing frozen."""
    federation = start()
    federation.round(1)
    at = Tick("federate", 2, 3, 0)
    received = federated(federation.method).dispatch(federation.server, federation.info("a"), at)
    site = federation.fresh("a")
    site.budget = replace(site.budget, weight_decay=0.5)
    memory, _ = finish(federated(federation.method).client_update(federation.memory("a"), received, site, at))
    model = federation.backbones[SMALL].model
    assert_same(model.dump(slot("shared")), received.arrays)
    start_of = federation.server_site.starts[SMALL]
    basis = {**select(start_of, slot(BASIS)), **select(federation.memory("a").arrays, slot(BASIS))}
    assert_same(model.dump(slot(BASIS)), basis)
    others = [key for key in memory.arrays if slot_of(key) not in (BASIS, "personal", "gate", slot_of(SKETCH))]
    assert others and not any("shared" in key or BASIS in key for key in others)
    held = sum(value.numel() for key, value in memory.arrays.items() if key in others and value.dim())
    assert held == 2 * model.count(federation.method.trainable())


def test_the_order_of_tasks_shows_in_the_running_gradient_and_not_in_the_plain_mean() -> None:
    """0.75 g1 + 0.25 g2 against 0.75 g2 + 0.25 g1: they differ, and their sum is g1 + g2."""
    found = []
    for rounds in ((1, 2), (2, 1)):
        federation = start("rela", relevance={"noise": 0.0, "ema": 0.25, "every": 1})
        sent = [federation.update("a", number)[1].payload.arrays[SKETCH] for number in rounds]
        found.append(sent)
    (first, ab), (second, ba) = found
    assert (ab - ba).norm() > 0.1 * (first - second).norm() > 0
    torch.testing.assert_close(ab + ba, first + second)


@dataclass(frozen=True)
class Wider:
    """The same texts with more padding than the longest of a batch needs."""

    inner: Examples

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        more = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.nn.functional.pad(value, (0, 3), value=more[name])
            for name, value in self.inner.batch(indices).items()
        }


@pytest.mark.parametrize("name", ["rela", "fedmosaic"])
def test_an_input_gate_weighs_every_token_by_itself_from_training_to_deployment_and_padding_nowhere(name: str) -> None:
    """A round with more padding leaves the same adapters, gates and gradient; what is deployed computes
    `W x + (1 - b_t) h_own + b_t h_mixture`, `b_t = sigmoid(<w, x_t>)`."""
    federation = start(name, gate="input", relevance={"every": 1})
    federation.round(1)
    at = Tick("federate", 2, 3, 0)
    received = federated(federation.method).dispatch(federation.server, federation.info("b"), at)
    found = []
    for padded in (False, True):
        site = federation.fresh("b")
        site.budget = replace(site.budget, optimiser="sgd", momentum=0.0, lr=0.5)
        if padded:
            inner = site.examples
            site.examples = site.common_examples = lambda split, inner=inner: Wider(inner(split))
        memory, reply = finish(federated(federation.method).client_update(Payload(), received, site, at))
        found.append({**memory.arrays, **reply.arrays})
    assert_near(found[1], found[0], rtol=1e-4, atol=1e-6)
    deployed = federation.method.deploy(memory, received, site)
    model, module = site.model, "block.00.up_proj"
    model.load(deployed.arrays)
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    w = deployed.arrays[f"gate/{module}/w"]
    b = (x @ w).sigmoid().unsqueeze(-1)
    assert float((b - 0.5).abs().max()) > 1e-3
    layer: Any = model.layers[module]
    expected = x @ layer.base.weight.T
    for weight, own in ((1 - b, "personal"), (b, "shared")):
        A, B = (deployed.arrays[f"{own}/{module}/{part}"] for part in "AB")
        expected = expected + weight * (16.0 / 4) * (x @ A.T @ B.T)
    with torch.no_grad(), model.active(*deployed.slots, mixer=deployed.mixer):
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_clients_with_equal_tasks_count_more_for_each_other_than_those_with_another() -> None:
    """Two clients each of two operations on words, no word of a task with both: the shipped model's own gradients."""
    experiment = load_experiment(
        {
            "benchmark": {"name": "skills", "clients": 2, "train": 24, "val": 1, "test": 1},
            "baselines": [],
            "model": {"id": "skills-llama-s", "max_length": 64},
            "adapter": {"targets": ["q_proj"]},
            "method": {"name": "rela", "rank": 2, "relevance": {"every": 1}},
            "train": {"max_steps": 3, "batch_size": 4},
        }
    )
    whole = load_federation(experiment)
    halves = tuple(
        replace(one, id=f"{one.id}-{part}", train=one.train[part::2]) for one in whole.clients for part in (0, 1)
    )
    host = Host(experiment, replace(whole, clients=halves, newcomers=()))
    server = Federation.on(host, host.build(experiment.method)).run(1)
    weights = server.part(GROUPS, EVERYBODY).arrays[WEIGHTS]
    ids = sorted(info.id for info in host.infos)
    tasks = [one.rpartition("-")[0] for one in ids]
    assert len(set(tasks)) == 2
    for row, task in zip(weights, tasks, strict=True):
        (alike,) = (float(value) for value, other in zip(row, tasks, strict=True) if other == task and value)
        others = [float(value) for value, other in zip(row, tasks, strict=True) if other != task]
        assert alike > 1.2 * max(others)
