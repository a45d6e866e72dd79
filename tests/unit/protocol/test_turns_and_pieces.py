"""Rounds that take turns in what travels, and downloads that have an adapter and pieces of any number."""

from __future__ import annotations

import pytest
import torch

from befit.adapters.forms import ModuleShape
from befit.adapters.layout import ModelShapes
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, Tick
from befit.core.wire_form import Wire
from befit.cost.traffic import communication
from befit.flower.own_slots import own_slots
from befit.protocol.download import check_download
from befit.protocol.guard import check_declared
from befit.protocol.jobs import finish
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from tests.tiny import make_site

SHAPES = ModelShapes({"block.00.q_proj": ModuleShape(6, 10)})


def made(name: str) -> tuple[Method, dict[str, torch.Tensor]]:
    method = build_method({"name": name, "rank": 2, "alpha": 4.0})
    return method, method.layout.initial(SHAPES, 0)


def test_in_its_turn_a_factor_may_travel_and_in_no_other_round() -> None:
    method, start = made("rolora")
    (stage,), specs = method.plan(), method.layout.specs(SHAPES)
    for round_, factor in ((1, "B"), (2, "A"), (3, "B")):
        reply = {key: value for key, value in start.items() if key.endswith(factor)}
        check_declared("a", Payload(reply), stage.reply_in(round_).specs(specs), ())
        with pytest.raises(PayloadMismatch, match="left out 1 declared arrays"):
            check_declared("a", Payload(reply), stage.reply_in(round_ + 1).specs(specs), ())
    sent = communication(method, specs, rounds=3, wire=Wire())
    assert sent["bytes_up_total"] == 4 * (20 + 12 + 20) and sent["bytes_down_total"] == 3 * 4 * (20 + 12)


def test_a_download_may_have_an_adapter_and_pieces_and_nothing_else() -> None:
    method, start = made("fedex_lora")
    specs, stages = method.layout.specs(SHAPES), method.plan()
    adapter = {key: value for key, value in start.items() if key.startswith("shared/")}
    piece = Payload({"update/block.00.q_proj/A": torch.zeros(7, 6), "update/block.00.q_proj/B": torch.zeros(10, 7)})
    received = Payload(adapter).with_part("pieces", Payload().with_part("3", piece))
    check_download("a", stages, received, specs)
    wrong = {key.replace("update", "base"): value for key, value in piece.arrays.items()}
    for other in (
        Payload({"base/block.00.q_proj/weight": torch.zeros(10, 6)}),
        Payload().with_part("pieces", Payload().with_part("3", Payload(wrong))),
        Payload(adapter).with_part("pieces", Payload().with_part("last", piece)),
    ):
        with pytest.raises(PayloadMismatch, match="not declare"):
            check_download("a", stages, other, specs)
    for key, shape in (("A", (7, 5)), ("B", (9, 7)), ("A", (6,))):
        changed = Payload({**piece.arrays, f"update/block.00.q_proj/{key}": torch.zeros(shape)})
        with pytest.raises(PayloadMismatch, match="with shape"):
            check_download("a", stages, Payload().with_part("pieces", Payload().with_part("3", changed)), specs)


def test_after_a_round_a_download_is_whole_but_for_what_a_method_says_may_be_fewer() -> None:
    method, start = made("fedex_lora")
    specs, stages = method.layout.specs(SHAPES), method.plan()
    adapter = {key: value for key, value in start.items() if key.startswith("shared/")}
    check_download("a", stages, Payload(adapter), specs, whole=True)  # pieces come when there are some
    for key in adapter:
        rest = Payload({other: value for other, value in adapter.items() if other != key})
        check_download("a", stages, rest, specs)  # as in a first round
        with pytest.raises(PayloadMismatch, match=f"client a was not sent '{key}', one of 1 arrays"):
            check_download("a", stages, rest, specs, whole=True)
    method, start = made("fedlease")
    specs, stages = method.layout.specs(SHAPES), method.plan()[2:]
    own = {key: value for key, value in start.items() if key.startswith("shared/")}
    check_download("a", stages, Payload(own), specs, whole=True)  # one cluster, and so one expert
    check_download("a", stages, Payload(), specs, whole=True)  # of a family of which nobody has replied yet
    site, told = make_site("vit", method.layout), Payload({}, {"group": 0})
    with pytest.raises(PayloadMismatch, match="no expert of the client's own cluster"):
        finish(stages[0].exchange.client_update(Payload(), told, site, Tick("federate", 2, 2, 0)))


@pytest.mark.parametrize(("name", "replies", "times"), [("flora", 5, 5), ("fedex_lora", 5, 6), ("fedmomentum", 1, 2)])
def test_estimates_count_pieces_for_all_replies(name: str, replies: int, times: int) -> None:
    method, _ = made(name)
    found = communication(method, method.layout.specs(SHAPES), rounds=2, wire=Wire(), replies=replies)
    assert found["bytes_down_per_round"] == times * found["bytes_up_per_round"] == times * 4 * 2 * (6 + 10)


def test_an_adapter_that_moves_into_everybodys_backbone_is_no_clients_own() -> None:
    assert own_slots(made("flora")[0]) == [] and own_slots(made("relora")[0]) == ["personal"]
