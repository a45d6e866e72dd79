"""Fast adaptation and the start of a newcomer (FedMosaic specification, section 6), and who gets the larger model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conftest import assert_near, assert_same, make_site, random_state
from tests.unit.rela.test_mosaic import FAMILIES, LARGE, SMALL, start

from befit.adapters.keys import select, slot, slot_of, split
from befit.adapters.layout import lora
from befit.config import TrainSettings
from befit.errors import ConfigError, DataError, PayloadMismatch
from befit.evaluate.adaptation import fast_adaptation, mean_start
from befit.evaluate.selection import gains, model_choice, scores_of_run
from befit.rela.newcomer import newcomer_mixture, newcomer_weights
from befit.rela.sketch import SKETCH
from befit.train.loop import Pass, train
from befit.types import Tick


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
    with pytest.raises(PayloadMismatch, match="nobody of its backbone"):
        newcomer_mixture(federation.server, own, "another")
    assert {split(key)[2] for key in found} == {"A", "B", "P", "Q"}


def test_the_curve_is_that_of_training_and_scoring_in_turn() -> None:
    budget = TrainSettings(max_steps=9, batch_size=4, lr=2e-2)
    site = make_site("vit", lora(2, 6.0, ("personal",)), budget=budget)
    begin = random_state(site.model, size=0.05)
    found = fast_adaptation(site, begin, steps=6, every=2)
    assert found.steps == (0, 2, 4, 6) and len(found.metrics) == 4
    assert not site.model.dump(slot("personal"))["personal/block.00.q_proj/B"].any()
    site.model.load(begin)
    expected, moments = [], {}
    one = Pass(slot("personal"), ("personal",), keep_optimiser=True)
    for number in range(4):
        if number:
            part = replace(site, budget=replace(budget, max_steps=2))
            moments = train(part, [one], Tick("adapt", number, 3, 0), moments=moments).moments
        with site.model.active("personal"):
            expected.append(site.task.evaluate(site.model.backbone, site.examples("test"), 32, "cpu"))
    assert list(found.metrics) == expected
    metric = site.task.metric
    assert found.mean(metric) == pytest.approx(sum(one[metric] for one in expected) / 4)
    again = fast_adaptation(site, {}, steps=2, every=2)
    site.model.reset()
    assert again.metrics[0] == site.task.evaluate(site.model.backbone, site.examples("test"), 32, "cpu")
    with pytest.raises(ConfigError, match="steps: must be a multiple of every, got 5 and 2"):
        fast_adaptation(site, begin, steps=5, every=2)


def test_the_mean_of_adapters_is_uniform_or_weighted() -> None:
    site = make_site("vit", lora(2, 6.0, ("personal",)))
    states = [select(random_state(site.model, seed), slot("personal")) for seed in (0, 1)]
    assert_near(mean_start(states), {key: (states[0][key] + states[1][key]) / 2 for key in states[0]})
    assert_same(mean_start(states, [1.0, 0.0]), states[0])


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
