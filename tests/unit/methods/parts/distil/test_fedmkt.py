"""FedMKT: what travels, whom the server believes, and what clients learn (docs/methods/fedmkt.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from befit.adapters.keys import select, slot, slot_of
from befit.adapters.model import model_shapes
from befit.adapters.state import norm, rename, specs_of
from befit.core.errors import ConfigError, NotTrained
from befit.core.values import Payload, State, TensorSpec, Update
from befit.core.wire_form import Wire
from befit.cost.traffic import communication
from befit.methods.parts.distil.knowledge import LOSSES, TOKENS, VALUES
from befit.protocol.guard import check_declared
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from tests.federation import FAMILIES, SMALL, Families, llama
from tests.tiny import assert_same, federated
from tests.unit.methods.parts.distil.families import ALIKE, RECORDS, started
from tests.unit.methods.parts.distil.test_ensemble import BATCH, rows

SETTINGS = {"positions": 6, "distil": {"samples": RECORDS, "top": 5}}
TOKENS_OF = [int((row[1:] != -100).sum()) for row in BATCH["labels"]]
STARTS = [sum(TOKENS_OF[:number]) for number in range(RECORDS)]


def server_model(federation: Families, family: str) -> State:
    return rename(select(federation.server.part(family).arrays, slot("server")), "personal")


def server_losses(federation: Families, family: str) -> torch.Tensor:
    return federation.server.part(family).arrays[LOSSES]


def losses_by_hand(federation: Families, family: str, state: State) -> torch.Tensor:
    """Mean cross-entropy over the answer tokens of each record, from a plain forward pass."""
    own = BATCH["labels"][:, 1:]
    tokens = torch.nn.functional.cross_entropy(
        rows(federation.backbones[family], state, "personal"), own[own != -100], reduction="none"
    )
    return torch.stack([tokens[start : start + n].mean() for start, n in zip(STARTS, TOKENS_OF, strict=True)])


def with_losses(update: Update, losses: list[float]) -> Update:
    return replace(update, payload=Payload({**update.payload.arrays, LOSSES: torch.tensor(losses)}))


@pytest.fixture(scope="module")
def round_one() -> tuple[Families, dict[str, Update]]:
    federation = started("fedmkt", **SETTINGS)
    return federation, federation.round(1)


def test_uploads_are_what_the_model_says_and_nothing_of_its_adapter(
    round_one: tuple[Families, dict[str, Update]],
) -> None:
    """The five likeliest tokens at every answer place, by a plain forward pass; zero where a record has no place."""
    federation, updates = round_one
    for client in "ab":
        arrays, family = updates[client].payload.arrays, FAMILIES[client]
        assert {slot_of(key) for key in arrays} == {"knowledge"} and len(arrays) == 3
        own = select(federation.memory(client).arrays, slot("personal"))
        predictions = rows(federation.backbones[family], own, "personal").softmax(-1)
        for record, count in enumerate(TOKENS_OF):
            there = predictions[STARTS[record] : STARTS[record] + min(count, 6)]
            torch.testing.assert_close(arrays[VALUES][record, : len(there)], there.topk(5).values)
            torch.testing.assert_close(
                there.gather(1, arrays[TOKENS][record, : len(there)].long()), arrays[VALUES][record, : len(there)]
            )
            assert not arrays[VALUES][record, len(there) :].any()
        torch.testing.assert_close(arrays[LOSSES], losses_by_hand(federation, family, own))
        (stage,) = federation.method.plan()
        declared = stage.reply.specs(specs_of(federation.server_site.starts[family]))
        check_declared(client, updates[client].payload, declared, ())


def test_bytes_are_those_of_the_formula_at_a_vocabulary_that_is_never_sent_whole() -> None:
    """samples (1 + positions k) floats and samples positions k tokens of 4 bytes, whatever the type of floats."""
    method = build_method({"name": "fedmkt", "rank": 4})
    specs = method.layout.specs(replace(model_shapes(llama(SMALL), "auto", False), outputs=128256))
    for width, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        found = communication(method, specs, 3, Wire(dtype))
        assert found["bytes_up_per_round"] == 80 * (1 + 64 * 128) * width + 80 * 64 * 128 * 4
        assert found["bytes_down_total"] == 3 * found["bytes_up_per_round"]
    small = build_method({"name": "fedmkt", "distil": {"samples": 10, "top": 32}})
    dense = communication(small, small.layout.specs(model_shapes(llama(SMALL), "auto", False)), 1, Wire())
    assert dense["bytes_up_per_round"] == 4 * 10 * (1 + 64 * 32)  # all classes of this model: no tokens


def test_a_first_round_is_training_alone() -> None:
    """The same steps on the same data from the same start, to the bit: nobody has learnt anything to pass on."""
    federation, alone = started("fedmkt", **SETTINGS), started("local", families=ALIKE)
    federation.update("a", 1)
    exchange = alone.method.plan()[0].exchange
    memory, _ = finish(exchange.client_update(Payload(), Payload(), alone.fresh("a"), federation.tick(1)))
    own = rename(select(federation.memory("a").arrays, slot("personal")), "own")
    assert_same(own, rename({key: memory.arrays[key] for key in memory.arrays if key.endswith(("/A", "/B"))}, "own"))


def test_the_server_learns_a_record_from_whoever_has_the_lowest_loss_there() -> None:
    """Client b claims records 0 and 1, c the rest but the last; nobody knows that better than the server models."""
    federation = started("fedmkt", **{**SETTINGS, "distil": {"samples": RECORDS, "top": 5, "epochs": 30, "lr": 0.5}})
    updates = {client: federation.update(client, 1)[1] for client in "abc"}
    high = [50.0] * RECORDS
    claims = {"a": high, "b": [1e-3] * 2 + high[2:], "c": high[:2] + [1e-3] * (RECORDS - 3) + high[:1]}
    changed = [with_losses(update, claims[client]) for client, update in updates.items()]
    before = {family: server_model(federation, family) for family in federation.backbones}
    federation.aggregate(changed, 1)
    for family, one in federation.backbones.items():
        distances = []
        for state in (before[family], server_model(federation, family)):
            predictions = rows(one, state, "personal").log_softmax(-1)
            there = []
            for record, client in enumerate("bb" + "c" * (RECORDS - 3)):
                arrays = updates[client].payload.arrays
                likeliest = arrays[TOKENS][record, : TOKENS_OF[record]].long()
                target = arrays[VALUES][record, : len(likeliest)]
                own = predictions[STARTS[record] : STARTS[record] + len(likeliest)]
                there.append(-(target / target.sum(1, keepdim=True) * own.gather(1, likeliest)).sum(1).mean())
            distances.append(float(torch.stack(there).mean()))
        assert distances[1] < distances[0] - 0.1
        torch.testing.assert_close(
            server_losses(federation, family), losses_by_hand(federation, family, server_model(federation, family))
        )


def test_where_nobody_knows_better_the_server_models_stay_and_still_answer() -> None:
    federation = started("fedmkt", **SETTINGS)
    updates = [with_losses(federation.update(client, 1)[1], [50.0] * RECORDS) for client in "ab"]
    before = {family: server_model(federation, family) for family in federation.backbones}
    federation.aggregate(updates, 1)
    for family, state in before.items():
        assert_same(server_model(federation, family), state)
        assert federation.received("a", 2).arrays


def test_a_client_learns_only_where_the_server_is_better(round_one: tuple[Families, dict[str, Update]]) -> None:
    """Claimed losses that are never lower change nothing; those of three records are three lessons."""
    federation, _ = round_one
    received = federation.received("a", 2)
    assert {slot_of(key) for key in received.arrays} == {"knowledge"}
    found, lessons = [], []
    for better in (0, 0, 3):
        losses = torch.tensor([0.0] * better + [60.0] * (RECORDS - better))
        values = torch.rand(received.arrays[VALUES].shape, generator=torch.Generator().manual_seed(better))
        site = federation.fresh("a")
        memory, _ = finish(
            federated(federation.method).client_update(
                federation.memory("a"),
                Payload({**received.arrays, LOSSES: losses, VALUES: values}),
                site,
                federation.tick(2),
            )
        )
        found.append(select(memory.arrays, slot("personal")))
        lessons.append(site.report["lessons"])
    assert lessons == [0, 0, 3]
    assert_same(found[0], found[1])
    assert any(not torch.equal(value, found[2][key]) for key, value in found[0].items())


def test_a_clients_losses_are_those_of_the_model_it_still_has(round_one: tuple[Families, dict[str, Update]]) -> None:
    federation, updates = round_one
    for client, update in updates.items():
        assert torch.equal(federation.memory(client).arrays[LOSSES], update.payload.arrays[LOSSES])


def test_claims_of_tokens_that_do_not_exist_harm_nobody() -> None:
    federation = started("fedmkt", **SETTINGS)
    _, update = federation.update("b", 1)
    arrays = update.payload.arrays
    wild = {**arrays, TOKENS: torch.full_like(arrays[TOKENS], 2**31 - 1), LOSSES: torch.full((RECORDS,), -1.0)}
    wild[TOKENS][0], wild[VALUES] = -5, torch.ones_like(arrays[VALUES])
    federation.aggregate([replace(update, payload=Payload(wild))], 1)
    assert all(torch.isfinite(value).all() for value in federation.server.arrays.values())


def test_whole_numbers_have_no_norm() -> None:
    """Tokens are names: neither a reply's nor a download's size, by which the guard judges, has them in it."""
    values = {"k/p/values": torch.tensor([3.0, 4.0])}
    assert norm({**values, "k/p/tokens": torch.tensor([10**6], dtype=torch.int32)}) == norm(values) == 5.0


def test_a_classifier_sends_all_its_classes_at_one_place() -> None:
    method = build_method({"name": "fedmkt", "distil": {"samples": 7}})
    shapes = replace(model_shapes(llama(SMALL), "auto", False), outputs=3, generates=False)
    declared = method.plan()[0].reply.specs(method.layout.specs(shapes))
    assert declared == {LOSSES: TensorSpec((7,)), VALUES: TensorSpec((7, 1, 3))}


def test_fewer_public_records_than_samples_leave_the_rest_zero() -> None:
    federation = started("fedmkt", positions=6, distil={"samples": RECORDS + 4, "top": 5})
    updates = federation.round(1, "ab")
    for update in updates.values():
        assert not update.payload.arrays[VALUES][RECORDS:].any() and update.payload.arrays[LOSSES][:RECORDS].all()
    federation.round(2, "ab")


def test_who_never_took_part_has_nothing_to_deploy_and_bad_settings_are_refused() -> None:
    federation = started("fedmkt", **SETTINGS)
    with pytest.raises(NotTrained, match="client a has no 'personal' adapter: it never completed"):
        federation.method.deploy(Payload(), Payload(), federation.fresh("a"))
    with pytest.raises(ConfigError, match="positions: must be positive"):
        build_method({"name": "fedmkt", "positions": 0})
