"""FedL2P against specification fedp2eft.md, section 4.1: the network, a client's round, early stopping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.conftest import assert_near, assert_same, make_site
from tests.unit.methods.federation import Clients

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout, Slot
from befit.eft.meta import MetaStep, _limit, directions, improve, in_two, rated_optimiser, train_at
from befit.eft.rates import ETA, RATES, RateNet, rate_multiples, ratenet_parameters
from befit.errors import ConfigError, DataError
from befit.methods.fedl2p import FedL2P
from befit.stream import Stream
from befit.train.loop import Pass, train
from befit.types import ClientInfo, Payload, Tick, Update

AT = Tick("meta", 1, 1, 0)
LOSS = "validation/all/loss"
SMALL: dict[str, Any] = {"rank": 2, "draws": 2}


def prepared(seed: int = 0):
    """A ViT with the adapter and a new network, its two parts, and random features."""
    layout = Layout((Slot(BUDGETED, 2, 4.0),), extras=(RateNet(),))
    site = make_site("vit", layout)
    features = torch.randn(2 * site.model.shapes.linears, generator=torch.Generator().manual_seed(seed))
    return site, in_two(site, 0.2, 0), select(site.model.dump(slot(RATES)), slot(RATES)), features


@pytest.mark.parametrize(("linears", "tensors", "numbers"), [(74, 148, 40_096), (197, 392, 89_584), (74, 74, 32_548),
                                                              (197, 196, 69_592)])  # fmt: skip
def test_networks_of_the_papers_models_have_the_sizes_of_section_8(linears: int, tensors: int, numbers: int) -> None:
    assert ratenet_parameters(linears, tensors) == numbers


def test_a_new_network_says_about_one_for_every_tensor_that_is_trained() -> None:
    site, _, net, features = prepared()
    tensors = site.model.leaves(slot(BUDGETED))
    out = rate_multiples(net, features)
    assert out.shape == (len(tensors),) and float((out - 1).abs().max()) < 0.5
    assert sum(value.numel() for value in net.values()) == ratenet_parameters(site.model.shapes.linears, len(tensors))


def test_rates_stay_at_or_above_zero_and_learn_from_there() -> None:
    _, _, net, features = prepared()
    net = {key: (value - 50 if key.endswith("third/b") else value).requires_grad_(True) for key, value in net.items()}
    out = rate_multiples(net, features)
    assert not out.any()
    out.sum().backward()
    bias = net[f"{RATES}/third/b"].grad
    assert bias is not None and bool((bias == 1).all())


@pytest.mark.parametrize(("rows", "held"), [(12, 2), (2, 1), (1, 1), (40, 8)])
def test_a_part_is_held_out_once_and_for_all(rows: int, held: int) -> None:
    site = make_site("vit", rows=rows)
    first, again = in_two(site, 0.2, 7), in_two(site, 0.2, 7)
    places = {split: first.examples(split).places for split in ("train", "val")}  # type: ignore[attr-defined]
    assert len(places["val"]) == held
    assert sorted({*places["val"].tolist(), *places["train"].tolist()}) == list(range(rows))
    assert rows == 1 or not set(places["val"].tolist()) & set(places["train"].tolist())
    assert torch.equal(places["val"], again.examples("val").places)  # type: ignore[attr-defined]
    batch = first.examples("val").batch([0])
    assert torch.equal(batch["labels"], site.examples("train").batch(places["val"][:1])["labels"])


def test_data_that_arrive_over_time_cannot_be_held_out() -> None:
    site = replace(make_site("vit"), stream=Stream("client-01", [range(12)], "static"))
    with pytest.raises(DataError, match=r"client-01 has a stream .* stream\.kind"):
        in_two(site, 0.2, 0)


def test_the_same_rate_everywhere_is_ordinary_training() -> None:
    site, *_ = prepared()
    start = site.model.dump(slot(BUDGETED))
    train(site, [Pass(slot(BUDGETED), (BUDGETED,))], AT, steps=6)
    expected = site.model.dump(slot(BUDGETED))
    site.model.load(start)
    ones = torch.ones(len(start))
    train_at(site, rated_optimiser(site), ones, site.batches("train", 6, AT), lambda step: site.budget.lr, ())
    assert_near(site.model.dump(slot(BUDGETED)), expected, rtol=1e-4, atol=1e-6)


def test_every_tensor_moves_against_its_direction_by_its_own_rate() -> None:
    site, *_ = prepared()
    multiples = torch.linspace(0, 2, len(site.model.leaves(slot(BUDGETED))))
    optimiser = rated_optimiser(site)
    for _ in range(3):
        before = site.model.dump(slot(BUDGETED))
        train_at(site, optimiser, multiples, site.batches("train", 1, AT), lambda step: 0.1, ())
    after, u = site.model.dump(slot(BUDGETED)), directions(optimiser)
    for key, factor, direction in zip(after, multiples.tolist(), u, strict=True):
        assert torch.allclose(after[key], before[key] - 0.1 * factor * direction, atol=1e-5), key


def test_a_round_leaves_start_and_network_alone_and_improves_the_network() -> None:
    site, parts, net, features = prepared()
    before, adapter = {key: value.clone() for key, value in net.items()}, site.model.dump(slot(BUDGETED))
    new, loss = improve(parts, AT, net, features, MetaStep(draws=2), 3, ())
    assert_same(net, before)
    assert_same(site.model.dump(slot(BUDGETED)), adapter)
    assert new.keys() == net.keys() and all(not torch.equal(new[key], net[key]) for key in net)
    assert loss > 0
    again, _ = improve(parts, AT, net, features, MetaStep(draws=2), 3, ())
    assert_same(again, new)


def test_the_released_sign_is_the_opposite_one() -> None:
    """Adam's first step is a sign: with one step and no terms, whose size would depend on the losses' scale."""
    _, parts, net, features = prepared()
    moved = {}
    for released in (False, True):
        new, _ = improve(parts, AT, net, features, MetaStep(outer=1, terms=0, released=released), 3, ())
        moved[released] = new[ETA] - net[ETA]
    assert torch.allclose(moved[True], -moved[False], atol=1e-4) and bool((moved[True].abs() > 5e-3).all())


def validation_after(site: Any, parts: Any, multiples: torch.Tensor) -> float:
    start = site.model.dump(slot(BUDGETED))
    train_at(parts, rated_optimiser(site), multiples, parts.batches("train", 6, AT), lambda step: site.budget.lr, ())
    held = parts.examples("val")
    with torch.no_grad(), site.model.active(BUDGETED):
        loss = float(site.loss(held.batch(torch.arange(len(held)))))
    site.model.load(start)
    return loss


def test_our_sign_lowers_the_validation_loss_and_the_released_one_does_not() -> None:
    """Sixty steps with a fast eta, on labels that are the same for all examples: more training is better."""
    site, _, net, features = prepared()
    examples = site.examples("train")
    examples.columns["labels"].zero_()  # type: ignore[attr-defined]
    parts = in_two(site, 0.25, 0)
    start = validation_after(site, parts, rate_multiples(net, features))
    ends = {}
    for released in (False, True):
        how = MetaStep(outer=20, draws=4, terms=3, psi=0.1, lr_eta=5e-2, released=released)
        new, _ = improve(parts, AT, net, features, how, 6, ())
        ends[released] = validation_after(site, parts, rate_multiples(new, features))
    assert ends[False] < start < ends[True]


def test_gradients_are_limited_entry_by_entry_or_as_released_by_their_norms() -> None:
    def limited(released: bool) -> tuple[torch.Tensor, torch.Tensor]:
        net, eta = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
        net.grad, eta.grad = torch.tensor([3.0, -0.5, 4.0]), torch.tensor([0.2, 0.0])
        _limit([net], eta, 0.1, released)
        return net.grad, eta.grad

    net, eta = limited(False)
    assert net.tolist() == [1.0, -0.5, 1.0] and eta.tolist() == [1.0, 0.0]  # 0.2 / lr is above one
    net, eta = limited(True)
    assert float(net.norm()) == pytest.approx(1, rel=1e-4) and float(eta.norm()) == pytest.approx(1, rel=1e-4)


def server_after(method: FedL2P, losses: list[float]) -> Payload:
    site = make_site("vit", method.layout)
    net = site.model.dump(slot(RATES))
    state = Payload({**net, **{key.replace(RATES, "best"): value for key, value in net.items()}}, {"stale": 0})
    for number, loss in enumerate(losses, start=1):
        arrays = {key: torch.full_like(value, float(number)) for key, value in net.items()}
        reply = Update(ClientInfo("a", "tiny", 4), Payload({**arrays, LOSS: torch.tensor([loss])}))
        state = method.aggregate(state, [reply], None, Tick("meta", number, 99, 0))  # type: ignore[arg-type]
    return state


def test_training_stops_after_exactly_so_many_rounds_without_a_lower_loss_and_the_best_network_stays() -> None:
    method = FedL2P(patience=50)
    almost, over = server_after(method, [2.0, 1.0, *[1.0] * 49]), server_after(method, [2.0, 1.0, *[1.5] * 60])
    info = ClientInfo("a", "tiny", 4)
    assert almost.scalars["stale"] == 49 and not method.dispatch(almost, info, AT).scalars["stopped"]
    assert over.scalars["stale"] == 50 and method.dispatch(over, info, AT).scalars["stopped"]
    assert float(over.arrays[ETA][0]) == 52  # rounds after the fiftieth change nothing
    assert float(over.arrays["best/eta/value"][0]) == 2 and over.scalars["lowest"] == 1.0


def test_clients_of_a_stopped_federation_reply_without_training() -> None:
    clients = Clients(FedL2P(**SMALL, patience=1))
    method = clients.method
    net = clients.model.dump(slot(RATES))
    site = clients.fresh("a")
    memory, reply = method.client_update(Payload(), Payload(net, {"stopped": True}), site, AT)
    assert_same(reply.arrays, {**net, LOSS: torch.zeros(1)})
    assert not memory.arrays and not site.report


def test_a_run_sends_the_network_and_one_number_and_nothing_else() -> None:
    clients = Clients(FedL2P(**SMALL))
    server = clients.run()
    assert not clients.notes.failures
    for at, update in clients.notes.updates:
        if at.stage == "meta":
            net = {key for key in clients.initial if key.startswith(f"{RATES}/")}
            assert update.payload.arrays.keys() == {*net, LOSS} and update.payload.arrays[LOSS].shape == (1,)
        else:
            assert not update.payload.arrays
        assert not update.payload.scalars
    sent = clients.uploads(2, "meta")
    for key in sent["a"].keys() - {LOSS}:
        expected = (6 * sent["a"][key] + 9 * sent["b"][key] + 12 * sent["c"][key]) / 27
        assert torch.allclose(server.arrays[key], expected, atol=1e-6)
    multiples = clients.memory("a").arrays["multiples/all/rate"]
    assert multiples.shape == server.arrays[ETA].shape and float(multiples.std()) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"validation": 1.0}, "validation: must be above 0"),
        ({"outer": 0}, "outer: must be at least 1"),
        ({"patience": 0}, "patience: must be at least 1"),
        ({"terms": -1}, "terms: must not be negative"),
        ({"psi": 0.0}, "psi: must be positive"),
        ({"base": {"name": "fedl2p"}}, "has a stage"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FedL2P(**arguments)
