"""Which arrays are compressed, what a client keeps for that, and what comes of it in a federation."""

from dataclasses import replace
from pathlib import Path

import pytest

from befit.adapters.keys import slot
from befit.core.values import TensorSpec
from befit.data.registry import build
from befit.methods.fedit import fedit
from befit.protocol.check import check
from befit.protocol.context import Context, Problem
from befit.protocol.engine import Checkpoint
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings, WireSettings
from befit.protocol.stage import Message, Personal, Stage
from befit.protocol.store import ClientStore
from befit.protocol.wire import compressed, wire_of
from tests.federation import AsBytes, Clients, Memo
from tests.unit.flower.states import same


def federation(store: ClientStore, settings: WireSettings, start: Checkpoint | None = None) -> Clients:
    method = fedit(rank=2)
    wire = wire_of(method, settings, [Clients(method).model.specs])
    return Clients(method, store=store, journal=Memo(point=start, wire=wire), wire=wire, engine_class=AsBytes)


INT8, TOP_K = WireSettings("int8"), WireSettings(top_k=0.1)


@pytest.mark.parametrize("settings", [INT8, WireSettings("int8", 0.2)], ids=["int8", "top-k in int8"])
def test_a_client_that_was_stopped_owes_what_it_owed(settings: WireSettings, tmp_path: Path) -> None:
    """Three rounds at once, and one round, a stop, and two more: the same server and clients, bit by bit."""
    whole = federation(ClientStore(None), settings)
    expected = whole.run(3)
    before = ClientStore(tmp_path)
    one = federation(before, settings)
    one.run(1)
    files = before.commit()
    after = ClientStore(tmp_path)
    after.restore(files, before.serial)
    two = federation(after, settings, one.journal.completed_points[-1])
    assert same(two.run(3), expected)
    for client in "abc":
        assert same(two.memory(client), whole.memory(client))
        owed = two.memory(client).part("owed").arrays
        assert owed and owed.keys() == expected.arrays.keys() and all(value.any() for value in owed.values())


def test_bytes_are_those_declared_and_what_a_client_owes_never_leaves() -> None:
    clients = federation(ClientStore(None), TOP_K)
    clients.run(2)
    wire = wire_of(clients.method, TOP_K, [clients.model.specs])
    (stage,) = clients.method.plan()
    expected = {n for key, spec in stage.reply.specs(clients.model.specs).items() for n in wire.sent_up(key, spec)}
    left = clients.journal.outbound.as_dict()["a"]
    assert {row["name"] for row in left if row["shape"]} == expected
    sent = sum(row["bytes"] for row in left if row["stage"] == "federate")
    assert {update.cost.bytes_up for _, update in clients.journal.updates if update.client.id == "a"} == {sent}


def test_what_only_goes_one_way_or_is_not_trained_travels_whole() -> None:
    """SCAFFOLD's control variates go both ways and nobody trains them; a sketch of gradients only goes up."""
    model = Clients(build_method("scaffold")).model
    wire = wire_of(build_method("scaffold"), TOP_K, [model.specs])
    assert wire.updates and all(key.startswith("shared/") for key in wire.updates)
    assert wire.sent_up("control/m/A", TensorSpec((9, 9))) == {"control/m/A": TensorSpec((9, 9))}
    assert not wire_of(build_method("scaffold"), WireSettings("bfloat16"), [model.specs]).updates


def test_an_update_is_trained_and_declared_alike_for_both_ways() -> None:
    layout = {f"{slot}/m/{key}": TensorSpec((4, 2)) for slot in ("shared", "frozen", "up") for key in "AB"}
    layout["shared/m/count"] = TensorSpec((4,), "int64")
    both = Message(slot("shared", "frozen", "up"))
    stage = Stage("federate", Personal, both, Message(slot("shared", "frozen")), trains=slot("shared", "up"))  # type: ignore[arg-type]
    assert compressed(stage, layout) == {"shared/m/A", "shared/m/B"}
    assert not compressed(replace(stage, up=None), layout)


def test_a_form_that_would_compress_nothing_is_refused() -> None:
    def problems(name: str, wire: WireSettings) -> list[Problem]:
        method = build_method(name)
        clients = Clients(method)
        data = build("digits", None, {"clients": 3})
        families = {client.id: "model" for client in data.clients}
        context = Context(data, families, TrainSettings(), {"model": clients.model.shapes}, wire=wire)
        return [one for one in check(method, context) if one.severity == "error"]

    (refused,) = problems("fedalt", INT8)
    assert refused.key == "wire" and "bfloat16" in refused.text
    assert not problems("fedalt", WireSettings("bfloat16"))
    assert not problems("fedit", INT8) and not problems("local", TOP_K)
    assert not problems("fedex_lora", TOP_K)  # whose rounds add pieces to what clients go on from
    assert problems("relora", TOP_K)  # whose clients start from nothing that is sent
    (refused,) = problems("fedlease", INT8)  # whose clients send their adapters once before they receive any
    assert refused.key == "wire" and "'cluster'" in refused.text
