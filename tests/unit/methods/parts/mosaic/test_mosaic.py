"""FedMosaic with two backbones of different depth and width: who gets what of whom, and what
never leaves a client or a family."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.adapters.gates import InputGate, ScalarGate
from befit.adapters.keys import select, slot, slot_of, split
from befit.adapters.layout import GATE
from befit.adapters.pq import BASIS
from befit.adapters.state import specs_of
from befit.core.errors import ConfigError, ModelError, NotTrained, PayloadMismatch
from befit.core.values import Payload, Tick, Update
from befit.methods.parts.mosaic.bank import EVERYBODY, GROUPS, WEIGHTS, absorb, described
from befit.methods.parts.mosaic.relevance import relevance, similarities
from befit.methods.parts.mosaic.sketch import SKETCH
from befit.protocol.guard import check_declared
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.train.optim import make_optimiser
from tests.federation import FAMILIES, LARGE, MIDDLE, SMALL, THREE, Families
from tests.tiny import assert_same, federated
from tests.unit.methods.parts.mosaic.families import start


@pytest.fixture(scope="module")
def twice() -> Iterator[tuple[Families, dict[str, Update], dict[str, Payload]]]:
    """Two rounds; the second round's uploads, and what was received before them."""
    federation = start()
    federation.round(1)
    at = Tick("federate", 2, 3, 0)
    received = {
        client: federated(federation.method).dispatch(federation.server, federation.info(client), at)
        for client in FAMILIES
    }
    yield federation, federation.round(2), received


Twice = tuple[Families, dict[str, Update], dict[str, Payload]]


def weights_of(updates: dict[str, Update], clients: str) -> torch.Tensor:
    cosines = similarities(torch.stack([updates[client].payload.arrays[SKETCH] for client in "abcde"]))
    return relevance(cosines, 0.5, ["abcde".index(client) for client in clients])


def test_cores_of_both_backbones_mix_at_the_same_place(twice: Twice) -> None:
    """Blocks 0 and 1 of the small model, 1 and 4 of the large: client b's core of block 1 goes to a's block 0."""
    federation, updates, _ = twice
    W = weights_of(updates, "abcde")
    mixture = federation.received("a", 3).arrays
    for k, (small, large) in enumerate(((0, 1), (1, 4))):
        for part in ("q_proj/P", "down_proj/Q"):

            def sent(
                client: str, k: int = k, part: str = part, blocks: tuple[int, int] = (small, large)
            ) -> torch.Tensor:
                block = blocks[FAMILIES[client] == LARGE]
                return updates[client].payload.arrays[f"personal/block.{block:02d}.{part}"]

            expected = sum(float(W[0, place]) * sent(client) for place, client in enumerate("abcde") if client != "a")
            torch.testing.assert_close(mixture[f"shared/block.{small:02d}.{part}"], expected)
            assert sent("b").any() and not torch.equal(sent("b"), sent("d")), k


def test_plain_factors_mix_within_a_backbone_with_weights_that_sum_to_one_there(twice: Twice) -> None:
    federation, updates, _ = twice
    mixture = federation.received("d", 3).arrays
    for part in ("q_proj/A", "up_proj/B"):  # b is the only other client with this backbone
        expected = updates["b"].payload.arrays[f"personal/block.02.{part}"]
        torch.testing.assert_close(mixture[f"shared/block.02.{part}"], expected)


def test_frozen_factors_and_gates_never_leave_and_nothing_else_is_missing(twice: Twice) -> None:
    federation, updates, received = twice
    for client, update in updates.items():
        arrays = update.payload.arrays
        assert {slot_of(key) for key in arrays} == {"personal", "sketch"}
        cores = {split(key)[1] for key in arrays if split(key)[2] in ("P", "Q")}
        assert not any(split(key)[2] in ("A", "B") and split(key)[1] in cores for key in arrays)
        stage = federation.method.plan()[0]
        declared = stage.reply.specs(specs_of(federation.server_site.starts[FAMILIES[client]]))
        assert {key: tuple(value.shape) for key, value in arrays.items()} == {
            key: spec.shape for key, spec in declared.items()
        }
        assert {slot_of(key) for key in received[client].arrays} == {"shared"}
        assert not any(slot_of(key) == GATE for key in (*arrays, *received[client].arrays))


def test_what_a_client_sends_has_the_size_that_its_widths_give(twice: Twice) -> None:
    """Small model, both blocks PQ: 14 modules of 4^2 + 4 = 20 entries, and 0.4 of a 16 x 24 gradient = 153."""
    _, updates, _ = twice
    assert sum(value.numel() for value in updates["a"].payload.arrays.values()) == 14 * 20 + 153
    large = {"q_proj": 48, "k_proj": 36, "v_proj": 36, "o_proj": 48, "gate_proj": 56, "up_proj": 56, "down_proj": 56}
    expected = 2 * 7 * 20 + 3 * 4 * sum(large.values()) + 153
    assert sum(value.numel() for value in updates["b"].payload.arrays.values()) == expected


def test_local_training_leaves_the_mixture_and_the_basis_as_received() -> None:
    federation = start()
    federation.round(1)
    received, _ = federation.update("a", 2)
    model = federation.backbones[SMALL].model
    held = model.dump(slot("shared"))
    assert_same(held, received.arrays)
    start_of = federation.server_site.starts[SMALL]
    assert federation.memory("a").arrays.keys().isdisjoint(held)
    basis = {**select(start_of, slot(BASIS)), **select(federation.memory("a").arrays, slot(BASIS))}
    assert_same(model.dump(slot(BASIS)), basis)


def test_before_anybody_has_sent_anything_the_mixture_is_the_initial_adapter() -> None:
    federation = start("rela")
    received = federation.received("a", 1)
    assert not received.arrays
    initial = federation.server_site.starts[SMALL]
    own, mixture = (
        {key.partition("/")[2]: value for key, value in initial.items() if slot_of(key) == name}
        for name in ("personal", "shared")
    )
    assert_same(own, mixture)


def test_whoever_is_alone_with_its_backbone_gets_its_own_adapter_back() -> None:
    federation = start("rela")
    updates = federation.round(1, "ab")
    for client in "ab":
        got = federation.received(client, 2).arrays
        own = {
            f"shared/{key.partition('/')[2]}": value
            for key, value in updates[client].payload.arrays.items()
            if slot_of(key) == "personal"
        }
        assert_same(got, own)


def test_mixtures_are_of_one_snapshot_whoever_is_first(twice: Twice) -> None:
    """In-place use of the first client's new state would break the symmetry of two clients."""
    federation = start("rela")
    updates = federation.round(1, "ac")
    for client, other in (("a", "c"), ("c", "a")):
        got = federation.received(client, 2).arrays
        for key, value in got.items():
            assert torch.equal(value, updates[other].payload.arrays[key.replace("shared", "personal")]), key


def test_a_client_that_sits_out_counts_with_what_it_sent_last() -> None:
    federation = start()
    first = federation.round(1)
    federation.round(2, "bd")
    groups = federation.server.part(GROUPS)
    assert groups.part(SMALL).arrays.keys() == {WEIGHTS}  # both blocks of the small model are PQ blocks
    cores = groups.part(EVERYBODY).arrays["own/0.q_proj/P"]
    assert torch.equal(cores[0], first["a"].payload.arrays["personal/block.00.q_proj/P"])
    assert not torch.equal(cores[1], first["b"].payload.arrays["personal/block.01.q_proj/P"])
    assert groups.part(EVERYBODY).arrays[SKETCH].shape == (5, 153)


def test_the_running_gradient_starts_whole_and_then_takes_the_share_of_the_new_round() -> None:
    """g_1, then 0.75 g_1 + 0.25 g_2; from zeros the first would be 0.25 g_1."""
    federation = start("rela", relevance={"noise": 0.0, "ema": 0.25, "every": 1})
    _, one = federation.update("a", 1)
    first = one.payload.arrays[SKETCH]
    _, two = federation.update("a", 2)
    alone = start("rela", relevance={"noise": 0.0, "every": 1})
    _, fresh = alone.update("a", 2)
    torch.testing.assert_close(two.payload.arrays[SKETCH], 0.75 * first + 0.25 * fresh.payload.arrays[SKETCH])
    assert torch.equal(federation.memory("a").arrays[SKETCH], two.payload.arrays[SKETCH])


def test_the_frozen_factors_of_a_pq_site_are_refused_by_the_bank() -> None:
    federation = start()
    _, update = federation.update("a", 1)
    smuggled = {**update.payload.arrays, "personal/block.00.q_proj/A": torch.ones(4, 16)}
    with pytest.raises(AssertionError, match=r"block\.00\.q_proj/A: "):
        absorb(federation.server, [replace(update, payload=Payload(smuggled))])


def test_a_gradient_of_another_model_is_refused_by_its_shape() -> None:
    """The large model's last projection has 24 x 32 entries, of which 307 would travel; all have to send 153."""
    federation = start("rela")
    _, update = federation.update("b", 1)
    stage = federation.method.plan()[0]
    declared = stage.reply.specs(specs_of(federation.server_site.starts[LARGE]))
    check_declared("b", update.payload, declared, ())
    other = {**update.payload.arrays, SKETCH: torch.zeros(307)}
    with pytest.raises(PayloadMismatch, match=r"client b sent sketch/last/gradient with shape \(307,\).*\(153,\)"):
        check_declared("b", Payload(other), declared, ())


@pytest.mark.parametrize("settings", [{"share": 0.3}, {"mask": "rows"}, {"weights": "another"}, {"seed": 7}, {}])
def test_gradients_of_another_model_or_of_other_entries_are_refused_before_training(settings: dict[str, Any]) -> None:
    """The server says by a hash what it compares; shapes alone would not tell other weights or another seed."""
    federation = start("rela")
    at = Tick("federate", 1, 3, 0)
    received = federated(federation.method).dispatch(federation.server, federation.info("b"), at)
    site, method = federation.fresh("b"), federation.method
    assert site.common is not None
    if "weights" in settings:
        site.common = replace(site.common, fingerprint="7" * 64)
    elif "seed" in settings:
        at = replace(at, seed=7)
    elif settings:
        method = build_method({"name": "rela", "rank": 4, "relevance": settings})
    if not settings:
        finish(federated(method).client_update(Payload(), received, site, at))
        return
    with pytest.raises(PayloadMismatch, match=r"client b .* share, mask, seed"):
        finish(federated(method).client_update(Payload(), received, site, at))


def test_backbones_without_the_same_sites_are_refused_with_the_first_that_differs() -> None:
    with pytest.raises(ModelError, match=r"small and large differ in their PQ modules: 0\.k_proj"):
        described(
            {
                "small": {"personal/block.00.q_proj/P": torch.ones(1)},
                "large": {"personal/block.00.q_proj/P": torch.ones(1), "personal/block.00.k_proj/P": torch.ones(1)},
            },
            1,
        )


def test_cores_learn_at_a_multiple_of_the_rate_and_the_rest_at_the_rate_itself() -> None:
    """One step of AdamW moves every entry by its learning rate, as the first step has no history."""
    federation = start(pq_rate=2.5)
    site = federation.fresh("b")
    site.budget = TrainSettings(max_steps=1, batch_size=4, lr=1e-3, weight_decay=0.0)
    before = site.model.dump(slot("personal"))
    finish(federated(federation.method).client_update(Payload(), Payload(), site, Tick("federate", 1, 3, 0)))
    after = site.model.dump(slot("personal"))
    core, plain = "personal/block.01.v_proj/P", "personal/block.00.v_proj/B"
    assert float((after[core] - before[core]).abs().median()) == pytest.approx(2.5e-3, rel=1e-2)
    assert float((after[plain] - before[plain]).abs().median()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "gate", "array", "rates"),
    [
        ("fedmosaic", "scalar", "beta", {}),
        ("fedmosaic", "input", "w", {}),
        ("fedmosaic", "scalar", "beta", {"gate_rate": 40.0}),
        ("fedmosaic", "input", "w", {"gate_rate": 0.5}),
        ("rela", "scalar", "beta", {"gate_rate": 40.0}),
    ],
)
def test_gates_learn_at_the_rate_itself_or_at_a_multiple_of_their_own(
    name: str, gate: str, array: str, rates: dict[str, float]
) -> None:
    """Both in PQ blocks and outside; a gate has a gradient once there is a mixture to choose."""
    settings: dict[str, Any] = {**rates, **({"pq_rate": 2.5} if name == "fedmosaic" else {})}
    federation = start(name, gate=gate, **settings)
    federation.round(1)
    at = Tick("federate", 2, 3, 0)
    received = federated(federation.method).dispatch(federation.server, federation.info("b"), at)
    site = federation.fresh("b")
    site.budget = TrainSettings(max_steps=1, batch_size=4, lr=1e-3, weight_decay=0.0)
    before = site.model.dump(slot("personal", GATE))
    finish(federated(federation.method).client_update(Payload(), received, site, at))
    after = site.model.dump(slot("personal", GATE))
    moved = {key: float((after[key] - before[key]).abs().median()) for key in before}
    for block in (0, 1):
        wanted = rates.get("gate_rate", 1.0) * 1e-3
        assert moved[f"gate/block.{block:02d}.v_proj/{array}"] == pytest.approx(wanted, rel=1e-2)
    assert moved["personal/block.00.v_proj/B"] == pytest.approx(1e-3, rel=1e-2)
    if name == "fedmosaic":
        assert moved["personal/block.01.v_proj/P"] == pytest.approx(2.5e-3, rel=1e-2)


def test_at_the_papers_rate_a_scalar_gate_stays_where_it_began() -> None:
    """1,880 steps of AdamW at 2e-5 move beta by 0.0376 at most, however steady its gradient: b = 0.5 +- 0.0094."""
    beta = torch.zeros(1, requires_grad=True)
    optimiser = make_optimiser([torch.nn.Parameter(beta)], TrainSettings(lr=2e-5, weight_decay=0.0))
    (beta,) = optimiser.param_groups[0]["params"]
    for _ in range(1880):
        beta.grad = torch.ones(1)
        optimiser.step()
    assert abs(float(beta.detach().sigmoid()) - 0.5) == pytest.approx(0.0094, abs=5e-5)


def test_who_never_took_part_has_nothing_to_deploy() -> None:
    federation = start("rela")
    with pytest.raises(NotTrained, match="client a has no 'personal' adapter: it never completed"):
        federation.method.deploy(Payload(), Payload(), federation.fresh("a"))


def test_a_rank_or_a_number_of_blocks_that_a_backbone_cannot_have_is_refused() -> None:
    with pytest.raises(ModelError, match="PQ-LoRA in 4 blocks: this model has 2"):
        start(blocks=4)
    with pytest.raises(ModelError, match=r"rank 9 .* narrower: block\.00\.k_proj \(8\)"):
        start(rank=9)


def test_a_backbone_without_a_plain_block_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Two blocks are all that the small model has, and two of five in the large one."""
    caplog.set_level("WARNING", logger="befit.methods.parts.mosaic.bank")
    start(blocks=2)
    (record,) = (one for one in caplog.records if one.name == "befit.methods.parts.mosaic.bank")
    assert SMALL in record.getMessage() and "(blocks: 2)" in record.getMessage()
    caplog.clear()
    start(blocks=1)
    assert not [one for one in caplog.records if one.name == "befit.methods.parts.mosaic.bank"]


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_method(
            {
                "name": "fedmosaic",
                "blocks": 0,
                "pq_rate": 0.0,
                "gate_rate": -1.0,
                "relevance": {
                    "temperature": 0.0,
                    "ema": 0.0,
                    "every": 0,
                    "share": 2.0,
                    "noise": -1.0,
                },
            }
        )
    keys = {problem.split(":")[0].rpartition(".")[2] for problem in caught.value.problems}
    assert keys == {"blocks", "temperature", "ema", "every", "share", "noise", "pq_rate", "gate_rate"}
    with pytest.raises(ConfigError, match=r"relevance\.similarity: colmean compares columns"):
        build_method({"name": "fedmosaic", "relevance": {"similarity": "colmean"}})


def test_the_server_keeps_one_copy_of_the_uploads_and_the_rows_of_those_who_stayed_away() -> None:
    """A second round is written into the stacks of the first; where somebody new comes, into larger ones."""
    federation = start("rela")
    first = federation.round(1, "abde")
    name = "own/block.02.q_proj/B"
    held = federation.server.part(GROUPS, LARGE).arrays[name]
    (of_d,) = [first["d"].payload.arrays["personal/block.02.q_proj/B"]]
    assert torch.equal(held[1], of_d)
    second = federation.round(2, "abe")
    assert federation.server.part(GROUPS, LARGE).arrays[name] is held and torch.equal(held[1], of_d)
    assert torch.equal(held[0], second["b"].payload.arrays["personal/block.02.q_proj/B"])
    sketches = federation.server.part(GROUPS, EVERYBODY).arrays[SKETCH].clone()
    third = federation.round(3, "c")
    grown = federation.server.part(GROUPS, EVERYBODY).arrays[SKETCH]
    assert len(grown) == 5 and torch.equal(grown[[0, 1, 3, 4]], sketches)
    assert torch.equal(grown[2], third["c"].payload.arrays[SKETCH])


def test_noise_at_the_upload_disturbs_what_is_sent_and_not_what_is_remembered() -> None:
    """Equation 3: `g~ = ghat + mu eps` once after the running mean, which goes on without it; eps fresh every round."""
    calm, loud = (start(relevance={"noise": noise, "noise_at": "upload"}) for noise in (0.0, 0.5))
    sent: list[torch.Tensor] = []
    for number in (1, 2):
        plain, noisy = calm.round(number)["a"], loud.round(number)["a"]
        torch.testing.assert_close(loud.memory("a").arrays[SKETCH], calm.memory("a").arrays[SKETCH])
        torch.testing.assert_close(plain.payload.arrays[SKETCH], calm.memory("a").arrays[SKETCH])
        sent.append(noisy.payload.arrays[SKETCH] - loud.memory("a").arrays[SKETCH])
        assert 0.3 < float(sent[-1].std()) < 0.7
        if number == 1:  # mixtures differ from then on, and with them what the second round trains
            for federation in (calm, loud):
                federation.server = calm.server
    assert not torch.allclose(*sent), "fresh in every round"
    usual = start(relevance={"noise": 0.5})
    usual.round(1)
    assert not torch.allclose(usual.memory("a").arrays[SKETCH], calm.memory("a").arrays[SKETCH]), "at gradients"


@pytest.mark.parametrize("name", ["rela", "fedmosaic"])
def test_the_gate_is_the_one_that_was_asked_for(name: str) -> None:
    gates = {"scalar": ScalarGate(), "input": InputGate(), "noisy-input": InputGate(math.log(2))}
    assert {gate: build_method({"name": name, "gate": gate}).layout.gate for gate in gates} == gates


def test_of_three_backbones_cores_mix_over_all_and_plain_factors_within_each() -> None:
    """Blocks 0 and 1 of two, 1 and 3 of four, 1 and 4 of five carry the cores; who is in a pair gets the other's A."""
    federation = start(families=THREE)
    federation.round(1, "abcdefg")
    updates = federation.round(2, "abcdefg")
    sent = {client: update.payload.arrays for client, update in updates.items()}
    W = relevance(similarities(torch.stack([sent[client][SKETCH] for client in "abcdefg"])), 0.5, range(7))
    assert (W + torch.eye(7) > 0).all()
    blocks = {SMALL: (0, 1), MIDDLE: (1, 3), LARGE: (1, 4)}
    at = Tick("federate", 3, 3, 0)
    for row, client in enumerate("abcdefg"):
        mixture = federated(federation.method).dispatch(federation.server, federation.info(client), at).arrays
        for k in (0, 1):
            for part in ("q_proj/P", "down_proj/Q"):
                cores = [sent[one][f"personal/block.{blocks[THREE[one]][k]:02d}.{part}"] for one in "abcdefg"]
                expected = torch.tensordot(W[row], torch.stack(cores), 1)
                torch.testing.assert_close(mixture[f"shared/block.{blocks[THREE[client]][k]:02d}.{part}"], expected)
    for client, other in ("bd", "db", "fg", "gf"):
        mixture = federated(federation.method).dispatch(federation.server, federation.info(client), at).arrays
        plain = {key: value for key, value in mixture.items() if split(key)[2] in ("A", "B")}
        assert plain
        for key, value in plain.items():
            torch.testing.assert_close(value, sent[other][key.replace("shared", "personal")])
