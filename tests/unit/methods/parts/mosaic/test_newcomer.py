"""Fast adaptation and the start of a newcomer (FedMosaic, Figure 6), and who gets the larger model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from befit.adapters.keys import select, slot, slot_of, split
from befit.adapters.layout import lora
from befit.adapters.pq import BASIS
from befit.core.errors import ConfigError, DataError, NotTrained, PayloadMismatch
from befit.core.values import ClientInfo, Payload, Tick, Update
from befit.methods.parts.mosaic.mixing import Relevance
from befit.methods.parts.mosaic.mosaic import Arrival, newcomer_mixture
from befit.methods.parts.mosaic.relevance import newcomer_weights
from befit.methods.parts.mosaic.sketch import SKETCH
from befit.protocol.guard import check_declared
from befit.protocol.jobs import finish
from befit.protocol.method import newcomer_stage
from befit.protocol.settings import TrainSettings
from befit.studies.adapt import fast_adaptation, mean_start
from befit.studies.select import gains, model_choice, scores_of_run
from befit.train.loop import train
from befit.train.passes import Pass
from tests.federation import FAMILIES, LARGE, SMALL, Families
from tests.tiny import assert_near, assert_same, federated, make_site, random_state, tiny_examples
from tests.unit.methods.parts.mosaic.families import start


def test_a_newcomer_weighs_clients_by_the_softmax_of_cosines_by_hand() -> None:
    sketches = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    expected = torch.tensor([1.0, 0.0, -1.0]).div(0.5).exp()
    found = newcomer_weights(sketches, torch.tensor([5.0, 0.0]))
    torch.testing.assert_close(found, expected / expected.sum())
    torch.testing.assert_close(newcomer_weights(sketches, torch.tensor([5.0, 0.0]), 1e6), torch.full((3,), 1 / 3))
    with pytest.raises(PayloadMismatch, match=r"shape \(3,\), those of the clients \(2,\)"):
        newcomer_weights(sketches, torch.ones(3))


def test_cores_come_from_everybody_and_the_rest_from_the_own_backbone() -> None:
    federation = start()
    updates = federation.round(1)
    own = updates["d"].payload.arrays[SKETCH]
    weights = newcomer_weights(torch.stack([updates[client].payload.arrays[SKETCH] for client in "abcde"]), own)
    assert int(weights.argmax()) == "abcde".index("d")
    found = newcomer_mixture(federation.server, own, LARGE)
    start_of = federation.server_site.starts[LARGE]
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in start_of.items() if slot_of(key) == "personal"
    }
    sent = {client: update.payload.arrays for client, update in updates.items()}
    places = {SMALL: "personal/block.00.v_proj/P", LARGE: "personal/block.01.v_proj/P"}
    core = torch.stack([w * sent[c][places[FAMILIES[c]]] for w, c in zip(weights, "abcde", strict=True)]).sum(0)
    torch.testing.assert_close(found["personal/block.01.v_proj/P"], core)
    pair = weights[[1, 3]] / weights[[1, 3]].sum()
    plain = pair[0] * sent["b"]["personal/block.02.q_proj/B"] + pair[1] * sent["d"]["personal/block.02.q_proj/B"]
    torch.testing.assert_close(found["personal/block.02.q_proj/B"], plain)
    with pytest.raises(NotTrained, match="nobody of its backbone"):
        newcomer_mixture(federation.server, own, "another")
    assert {split(key)[2] for key in found} == {"A", "B", "P", "Q"}


def arrive(federation: Families, client: str = "f") -> tuple[Payload, Payload]:
    """The server's memory for a newcomer with the large model, and what it sent."""
    stage, at = newcomer_stage(federation.method), Tick("arrive", 1, 1, 0)
    assert stage is not None
    info = ClientInfo(client, LARGE, 12)
    received = stage.exchange.dispatch(federation.server, info, at)
    site = replace(federation.fresh("d"), info=info)
    memory, reply = finish(stage.exchange.client_update(Payload(), received, site, at))
    assert memory == Payload()
    check_declared(client, reply, stage.reply.specs(site.model.specs), stage.reply.numbers)
    return stage.exchange.aggregate(federation.server, [Update(info, reply)], federation.server_site, at), reply


def test_a_newcomer_sends_one_gradient_and_uses_its_mixture_at_full_strength() -> None:
    """What it deploys is the mixture alone, with the bases aligned for its backbone; nobody else gets anything else."""
    federation = start()
    federation.round(1)
    method, at = federation.method, Tick("federate", 1, 1, 0)
    before = {
        client: federated(method).dispatch(federation.server, federation.info(client), at).arrays for client in "abcde"
    }
    memory, reply = arrive(federation)
    assert set(reply.arrays) == {SKETCH}
    received = federated(method).dispatch(memory, ClientInfo("f", LARGE, 12), at)
    expected = newcomer_mixture(federation.server, reply.arrays[SKETCH], LARGE, name="shared")
    assert_same({k: v for k, v in received.arrays.items() if slot_of(k) == "shared"}, expected)
    assert {slot_of(key) for key in received.arrays} == {"shared", BASIS}
    for client, arrays in before.items():
        assert_same(federated(method).dispatch(memory, federation.info(client), at).arrays, arrays)
    site = federation.fresh("d")
    deployed = method.deploy(Payload(), received, site)
    assert deployed.slots == ("shared",) and deployed.mixer == "sum"
    batch = site.examples("test").batch(torch.arange(4))
    found = []
    for arrays, slots in (
        (deployed.arrays, ("shared",)),
        ({**received.arrays, **newcomer_mixture(federation.server, reply.arrays[SKETCH], LARGE)}, ("personal",)),
        ({}, ()),
    ):
        site.model.reset()
        site.model.load(arrays)
        with torch.no_grad(), site.model.active(*slots):
            found.append(site.logits(batch))
    torch.testing.assert_close(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 1e-3
    with pytest.raises(NotTrained, match="newcomer d has no training examples"):
        empty = replace(federation.fresh("d"), examples=lambda split: tiny_examples("llama", 0, 0))
        finish(Arrival(Relevance(), method.layout.extras[0]).client_update(Payload(), Payload(), empty, at))  # type: ignore[arg-type]


@pytest.mark.parametrize("mixing", ["equal", "nash"])
def test_without_gradients_a_newcomer_sends_nothing_and_gets_the_mean_or_the_bargain(mixing: str) -> None:
    federation = start("rela", mixing=mixing)
    updates = federation.round(1)
    memory, reply = arrive(federation)
    assert not reply.arrays
    at, key = Tick("federate", 1, 1, 0), "block.02.q_proj/B"
    found = federated(federation.method).dispatch(memory, ClientInfo("f", LARGE, 12), at).arrays[f"shared/{key}"]
    sent = [updates[client].payload.arrays[f"personal/{key}"] for client in "bd"]
    bargain = federated(federation.method).dispatch(federation.server, federation.info("b"), at).arrays[f"shared/{key}"]
    torch.testing.assert_close(found, (sent[0] + sent[1]) / 2 if mixing == "equal" else bargain)


def test_the_curve_is_that_of_training_and_scoring_in_turn() -> None:
    budget = TrainSettings(max_steps=9, batch_size=4, lr=2e-2)
    site = make_site("vit", lora(2, 6.0, ("personal",)), budget=budget)
    begin = random_state(site.model, size=0.05)
    found = fast_adaptation(site, begin, steps=6, every=2)
    assert found.steps == (0, 2, 4, 6) and len(found.metrics) == 4
    assert not site.model.dump(slot("personal"))["personal/block.00.q_proj/B"].any()
    site.model.load(begin)
    expected, memory = [], Payload()
    one = Pass(slot("personal"), ("personal",), keep_optimiser=True)
    for number in range(4):
        if number:
            part = replace(site, budget=replace(budget, max_steps=2))
            memory = train(part, [one], Tick("adapt", number, 3, 0), memory=memory).memory
        with site.model.active("personal"):
            expected.append(site.task.evaluate(site.model.backbone, site.examples("test"), 32, "cpu"))
    assert list(found.metrics) == expected
    metric = site.task.metric
    assert found.mean(metric) == pytest.approx(sum(one[metric] for one in expected) / 4)
    again = fast_adaptation(site, {}, steps=2, every=2)
    site.model.reset()
    assert again.metrics[0] == site.task.evaluate(site.model.backbone, site.examples("test"), 32, "cpu")
    with pytest.raises(ConfigError, match=r"steps: must be .* \(--steps and --every\), got 5 and 2"):
        fast_adaptation(site, begin, steps=5, every=2)


def test_the_mean_of_adapters_is_uniform_or_weighted() -> None:
    site = make_site("vit", lora(2, 6.0, ("personal",)))
    states = [select(random_state(site.model, seed), slot("personal")) for seed in (0, 1)]
    assert_near(mean_start(states), {key: (states[0][key] + states[1][key]) / 2 for key in states[0]})


DRAKE = (0.90, 1.03, 1.70, 0.80), (2.85, 12.80, 15.84, 16.53, 10.01, 6.37)
HFLB = (0.55, -0.86, 1.62), (1.12, 2.26, 2.27, 2.83, 3.05, 2.05)


@pytest.mark.parametrize("threshold", [1.70, 2.0, 2.8])
def test_a_threshold_gives_the_papers_models_on_drake(threshold: float) -> None:
    small, large = DRAKE
    chosen = model_choice({str(n): gain for n, gain in enumerate(small + large)}, threshold)
    assert list(chosen.values()) == ["small"] * 4 + ["large"] * 6


def test_no_threshold_gives_the_papers_models_on_hflb() -> None:
    """One that gains 1.62 has the small model, one that gains 1.12 the large."""
    small, large = HFLB
    gained = {str(n): gain for n, gain in enumerate(small + large)}
    wanted = ["small"] * 3 + ["large"] * 6
    assert all(list(model_choice(gained, threshold / 100).values()) != wanted for threshold in range(-200, 400))


def test_gains_come_from_two_finished_runs_and_need_every_client_in_both() -> None:
    runs = [{"metric": "accuracy", "clients": {"a": {"accuracy": low}, "b": {"accuracy": 0.5}}} for low in (0.25, 0.75)]
    assert gains(*map(scores_of_run, runs)) == {"a": 50.0, "b": 0.0}
    with pytest.raises(DataError, match="client b was trained with one of the two models only"):
        gains({"a": 1.0}, {"a": 2.0, "b": 1.0})
    with pytest.raises(DataError, match="client a has no score"):
        gains(scores_of_run({"metric": "m", "clients": {"a": {"m": None}}}), {"a": 1.0})
