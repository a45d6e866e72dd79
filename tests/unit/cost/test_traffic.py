"""Bytes of stages, from a plan written by hand."""

from dataclasses import dataclass

import pytest
import torch

from befit.adapters.forms import DENSE, ModuleShape
from befit.adapters.keys import factor, module, slot
from befit.adapters.layout import Layout, ModelShapes, Slot
from befit.core.values import TensorSpec
from befit.core.wire_form import Wire
from befit.cost.compute import count, slot_sizes
from befit.cost.traffic import communication, stage_traffic, totals
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.stage import Message, Personal, Stage


@dataclass(frozen=True)
class Download(Personal):
    """A personal stage that receives one array."""

    def client_update(self, client, received, site, at):
        raise NotImplementedError


@dataclass(frozen=True)
class ByHand(Method):
    """Trains alone for 7 rounds, federates for as many as the configuration says, then receives A once."""

    layout = Layout((Slot("shared", 2, 4.0), Slot("own", 3, 6.0)), gated=("shared", "own"))

    def plan(self):
        return [
            Stage("alone", Download(), None, A, 7),
            Stage(
                "federate",
                Download(),
                Message(slot("shared"), become=lambda adapter: {**adapter, **COUNTS}),
                Message(slot("shared") & module("block.*")),
            ),
            Stage("last", Download(), None, A, 1),
        ]

    def _unused(self, *_):
        raise NotImplementedError

    server_init = client_init = deploy = _unused


A = Message(slot("shared") & factor("A"))
COUNTS = {"statistics/block.00.q_proj/count": TensorSpec((5,), "int64")}
SHAPES = ModelShapes({"block.00.q_proj": ModuleShape(10, 20)}, {"classifier": ModuleShape(20, 4, bias=True)})
BARE = ModelShapes(SHAPES.targets, {})
SPECS = ByHand.layout.specs(SHAPES)


def test_the_totals_are_those_of_a_sum_on_paper():
    """Shared: A 2*10, B 20*2, head 4*20 + 4 = 144 entries, and 5 integers of 8 bytes go up; A and B = 60 come down.

    Up: 144*4 + 40 = 616 in each of 3 rounds. Down: 60*4 = 240 in each of 3, A = 80 in each of 7 + 1.
    """
    assert communication(ByHand(), SPECS, rounds=3, wire=Wire()) == {
        "bytes_up_per_round": 616,
        "bytes_up_total": 1848,
        "bytes_down_per_round": 240,
        "bytes_down_total": 720 + 640,
    }


def test_a_narrower_wire_leaves_integers_as_they_are():
    """144*2 + 40."""
    assert communication(ByHand(), SPECS, rounds=1, wire=Wire(torch.bfloat16))["bytes_up_per_round"] == 328


def test_stages_keep_their_own_rounds_and_say_who_may_send():
    stages = stage_traffic(ByHand(), SPECS, rounds=3, wire=Wire())
    assert [(one.name, one.rounds, one.federated, sum(one.up.values()), sum(one.down.values())) for one in stages] == [
        ("alone", 7, False, 0, 80),
        ("federate", 3, True, 616, 240),
        ("last", 1, False, 0, 80),
    ]


def test_a_round_is_one_of_the_last_stage_that_federates():
    """What goes once is in the totals and in no round: the personal adapters that FDLoRA starts from."""
    sizes = communication(build_method("fdlora"), build_method("fdlora").layout.specs(BARE), rounds=3, wire=Wire())
    assert sizes["bytes_up_per_round"] == sizes["bytes_down_per_round"] == 4 * 8 * (10 + 20)
    assert sizes["bytes_up_total"] == 4 * sizes["bytes_up_per_round"]


def test_a_part_is_counted_by_its_keys():
    """The head's 84 entries go up and never down."""
    stages = stage_traffic(ByHand(), SPECS, rounds=3, wire=Wire())
    head = totals(stages, lambda key: "/classifier/" in key)
    assert head == {"bytes_up_per_round": 336, "bytes_up_total": 1008, "bytes_down_per_round": 0, "bytes_down_total": 0}


def test_slots_are_counted_by_factor_with_the_head_apart():
    """The gate weighs two slots at every module: 2*10 at q_proj and 2*20 at the classifier."""
    assert slot_sizes(SPECS, SHAPES.heads) == {
        "shared": {"A": 20, "B": 40, "head": 84, "total": 144},
        "own": {"A": 30, "B": 60, "head": 84, "total": 174},
        "gate": {"A": 0, "B": 0, "head": 0, "G": 60, "total": 60},
    }
    assert count(SPECS) == 144 + 174 + 60


def test_a_dense_update_of_a_target_is_no_head():
    dense = Layout((Slot("merged", 2, 4.0, form=DENSE),))
    assert slot_sizes(dense.specs(SHAPES), SHAPES.heads)["merged"] == {
        "A": 0,
        "B": 0,
        "head": 84,
        "weight": 200,
        "total": 284,
    }


def test_a_dtype_that_does_not_exist_is_an_error_and_not_four_bytes():
    with pytest.raises(AttributeError):
        communication(ByHand(), {**SPECS, "shared/x/A": TensorSpec((1,), "float31")}, rounds=1, wire=Wire())
