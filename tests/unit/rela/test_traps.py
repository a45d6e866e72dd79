"""Traps of FedMosaic's specification, section 9.2, that no other file is about; and property 9 of section 9.3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.conftest import assert_near, assert_same, make_site, tiny_model
from tests.unit.rela.test_mosaic import SMALL, start

from befit.adapters.keys import EVERYTHING, select, slot, slot_of
from befit.adapters.model import AdaptedModel
from befit.adapters.pq import BASIS
from befit.registry import build_method
from befit.rela.bank import absorb
from befit.rela.sketch import SKETCH
from befit.seeds import derive_seed
from befit.site import ServerSite
from befit.types import Payload, State, Tick

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
    received = method.dispatch(method.server_init(server), site.info, AT)
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
    memory, reply = stage.exchange.client_update(
        method.client_init(site), replace(received, arrays={**received.arrays, **arrays}), site, AT
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
    server = federation.method.aggregate(start("rela", mixing="equal").server, narrow, federation.server_site, AT)
    key = "block.00.q_proj/A"
    sent = [one.payload.arrays[f"personal/{key}"] for one in narrow if one.client.id in "ce"]
    found = federation.method.dispatch(server, federation.info("a"), AT).arrays[f"shared/{key}"]
    torch.testing.assert_close(found.double(), (sent[0].double() + sent[1].double()) / 2, rtol=1e-6, atol=1e-8)
    stacks, _ = absorb(start("rela", mixing="equal").server, narrow)
    assert {stack.dtype for stack in stacks.values()} == {torch.float32}


def test_weight_decay_and_optimiser_leave_frozen_factors_alone() -> None:
    """With a decay of one half, what is frozen stays to the bit, and the optimiser's averages are of nothing frozen."""
    federation = start()
    federation.round(1)
    at = Tick("federate", 2, 3, 0)
    received = federation.method.dispatch(federation.server, federation.info("a"), at)
    site = federation.site("a")
    site.budget = replace(site.budget, weight_decay=0.5)
    memory, _ = federation.method.client_update(federation.memories["a"], received, site, at)
    model = federation.backbones[SMALL].model
    assert_same(model.dump(slot("shared")), received.arrays)
    start_of = federation.server_site.starts[SMALL]
    basis = {**select(start_of, slot(BASIS)), **select(federation.memories["a"].arrays, slot(BASIS))}
    assert_same(model.dump(slot(BASIS)), basis)
    others = [key for key in memory.arrays if slot_of(key) not in (BASIS, "personal", "gate", slot_of(SKETCH))]
    assert others and not any("shared" in key or BASIS in key for key in others)
    held = sum(value.numel() for key, value in memory.arrays.items() if key in others and value.dim())
    assert held == 2 * model.count(federation.method.trainable())


def test_the_order_of_tasks_shows_in_the_running_gradient_and_not_in_the_plain_mean() -> None:
    """0.75 g1 + 0.25 g2 against 0.75 g2 + 0.25 g1: they differ, and their sum is g1 + g2."""
    found = []
    for rounds in ((1, 2), (2, 1)):
        federation = start("rela", noise=0.0, ema=0.25, every=1)
        sent = [federation.update("a", number)[1].payload.arrays[SKETCH] for number in rounds]
        found.append(sent)
    (first, ab), (second, ba) = found
    assert (ab - ba).norm() > 0.1 * (first - second).norm() > 0
    torch.testing.assert_close(ab + ba, first + second)
