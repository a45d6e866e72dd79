"""FedL2P as docs/methods/fedl2p.md has it: the network, a client's round, early stopping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout, Slot
from befit.core.errors import ConfigError
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.fedl2p import FedL2P
from befit.methods.parts.budget.features import features
from befit.methods.parts.budget.meta import MetaStep, _limit, directions, improve, in_two, rated_optimiser, train_at
from befit.methods.parts.budget.rates import ETA, RATES, RateNet, rate_multiples
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.runs.runner import check
from befit.train.loop import train
from befit.train.passes import Pass
from tests.federation import BUDGET, Clients
from tests.tiny import assert_near, assert_same, federated, make_site, random_state
from tests.unit.methods.parts.budget.sizes import ratenet_parameters

AT = Tick("meta", 1, 1, 0)
LOSS = "validation/all/loss"
SMALL: dict[str, Any] = {"rank": 2, "draws": 2}


def prepared(seed: int = 0):
    """A ViT with the adapter and a new network, its two parts, and random features."""
    layout = Layout((Slot(BUDGETED, 2, 4.0),), extras=(RateNet(),))
    site = make_site("vit", layout)
    features = torch.randn(2 * site.model.shapes.linears, generator=torch.Generator().manual_seed(seed))
    return site, in_two(site, 0.2, 0), select(site.model.dump(slot(RATES)), slot(RATES)), features


@pytest.mark.parametrize(
    ("linears", "tensors", "numbers"), [(74, 148, 40_096), (197, 392, 89_584), (74, 74, 32_548), (197, 196, 69_592)]
)
def test_networks_of_the_papers_models_have_the_sizes_of_their_shapes(linears: int, tensors: int, numbers: int) -> None:
    assert ratenet_parameters(linears, tensors) == numbers


def test_a_new_network_says_about_one_for_every_tensor_that_is_trained() -> None:
    site, _, net, features = prepared()
    tensors = site.model.leaves(slot(BUDGETED))
    out = rate_multiples(net, features)
    assert out.shape == (len(tensors),) and float((out - 1).abs().max()) < 0.5
    assert sum(value.numel() for value in net.values()) == ratenet_parameters(site.model.shapes.linears, len(tensors))


def test_a_new_network_is_drawn_as_stated() -> None:
    """Xavier normal with gain 0.1: the standard deviation is 0.1 sqrt(2 / (in + out)); biases and eta are one."""
    _, _, net, _ = prepared()
    for key, value in net.items():
        if key.endswith("/W"):
            # Of n numbers the deviation is within 4 / sqrt(2 n) of the true one.
            wanted = 0.1 * (2 / sum(value.shape)) ** 0.5
            assert float(value.std()) == pytest.approx(wanted, rel=4 / (2 * value.numel()) ** 0.5), key
        else:
            assert bool((value == 1).all()), key


@pytest.mark.parametrize(("shift", "bound"), [(-50, 0), (5000, 1000)])
def test_rates_stay_from_zero_to_a_thousand_and_learn_from_there(shift: float, bound: float) -> None:
    _, _, net, features = prepared()
    net = {key: value + shift if key.endswith("third/b") else value for key, value in net.items()}
    net = {key: value.requires_grad_(True) for key, value in net.items()}
    out = rate_multiples(net, features)
    assert bool((out == bound).all())
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


def two_examples() -> tuple[Site, Site, State, torch.Tensor]:
    """A client with one example in each part, so that all batches and draws are these, on top of a shared adapter."""
    layout = Layout((Slot("shared", 2, 4.0), Slot(BUDGETED, 2, 4.0)), extras=(RateNet(),))
    site = make_site("vit", layout, rows=2)
    site.model.load(select(random_state(site.model), slot("shared")))
    net = select(site.model.dump(slot(RATES)), slot(RATES))
    # Away from one, which could stand in for another.
    net[ETA] = torch.linspace(0.5, 1.5, len(net[ETA]))
    features = torch.randn(2 * site.model.shapes.linears, generator=torch.Generator().manual_seed(0))
    return site, in_two(site, 0.5, 0), net, features


def test_a_rounds_gradient_and_loss_are_those_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of Adam at the network's rates; then, with `omega = before - rate u`, the derivative by the network of
    `<grad L_T(omega), p>`, where p is the series, twice for two draws; and L_V(omega)."""
    site, parts, net, features = two_examples()
    found: list[torch.Tensor] = []

    def looked_at(network: list[torch.Tensor], eta: torch.Tensor, lr: float, released: bool) -> None:
        found.extend(value.grad.clone() for value in (*network, eta) if value.grad is not None)
        _limit(network, eta, lr, released)

    monkeypatch.setattr("befit.methods.parts.budget.meta._limit", looked_at)
    _, loss = improve(parts, AT, net, features, MetaStep(outer=1, draws=2, terms=2, psi=0.1), 2, ("shared",))

    theta = {key: value.clone().requires_grad_(True) for key, value in net.items()}
    rates = site.budget.lr * rate_multiples(theta, features)
    over = list(site.model.leaves(slot(BUDGETED)).values())

    def loss_of(split: str) -> torch.Tensor:
        return site.loss(parts.examples(split).batch([0]))

    with site.model.active("shared", BUDGETED), site.model.trainable(slot(BUDGETED)):
        mean = square = u = [torch.zeros_like(one) for one in over]
        for step in (1, 2):
            gradients = torch.autograd.grad(loss_of("train"), over)
            mean = [0.9 * m + 0.1 * g for m, g in zip(mean, gradients, strict=True)]
            square = [0.999 * v + 0.001 * g * g for v, g in zip(square, gradients, strict=True)]
            u = [
                m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8) for m, v in zip(mean, square, strict=True)
            ]
            with torch.no_grad():
                for one, rate, direction in zip(over, rates, u, strict=True):
                    one -= rate * direction
        assert loss == pytest.approx(float(loss_of("val").detach()), rel=1e-4)
        gradients = torch.autograd.grad(loss_of("train"), over, create_graph=True)

        def curved(vector: list[torch.Tensor]) -> list[torch.Tensor]:
            along = torch.stack([(g * v).sum() for g, v in zip(gradients, vector, strict=True)]).sum()
            return list(torch.autograd.grad(along, over, retain_graph=True))

        term = p = list(torch.autograd.grad(loss_of("val"), over))
        for _ in range(2):
            term = [v - 0.1 * h for v, h in zip(term, curved(term), strict=True)]
            p = [one + v for one, v in zip(p, term, strict=True)]
        by_rate = torch.stack([-(h * d).sum() for h, d in zip(curved(p), u, strict=True)])
    expected = torch.autograd.grad(2 * (rates * by_rate).sum(), list(theta.values()))
    order = [key for key in net if key != ETA] + [ETA]
    for key, gradient in zip(order, found, strict=True):
        wanted = expected[list(theta).index(key)]
        assert bool(wanted.any())
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())), key


def test_a_rounds_loss_is_the_mean_over_its_trainings() -> None:
    """One training after the other, each from the start, at the network that the one before has left. Adam's memory of
    a step does not change the loss after the next training."""
    _, parts, net, features = two_examples()
    how = MetaStep(draws=1, lr_eta=0.3)
    once, first = improve(parts, AT, net, features, replace(how, outer=1), 2, ("shared",))
    _, second = improve(parts, AT, once, features, replace(how, outer=1), 2, ("shared",))
    _, both = improve(parts, AT, net, features, replace(how, outer=2), 2, ("shared",))
    assert abs(first - second) > 1e-3
    assert both == pytest.approx((first + second) / 2, rel=1e-5)


def personalised(change: str = "") -> tuple[State, State, State]:
    """What the last two stages leave with client a, and the network that is best and not the last.

    change  the part of its examples that is another one than else
    """
    clients = Clients(FedL2P(**SMALL))
    if change:
        part = in_two(clients.fresh("a"), 0.2, 0).examples(change)
        part.examples.columns["pixel_values"][part.places] += 1.0  # type: ignore[attr-defined]
    net = {key: value + 0.1 for key, value in select(clients.initial, slot(RATES)).items()}
    last = {key: value + 0.5 for key, value in net.items()}
    server = Payload(last, {"stale": 1}).with_part("best", Payload(net))
    memory = Payload()
    for stage in clients.method.plan()[1:]:
        at = Tick(stage.name, 1, 1, 0)
        received = stage.exchange.dispatch(server, clients.infos[0], at)
        memory, _ = finish(stage.exchange.client_update(memory, received, clients.fresh("a"), at))
    return net, dict(memory.arrays), select(dict(memory.arrays), slot(BUDGETED))


def test_clients_get_their_rates_from_the_best_network_and_not_from_the_last() -> None:
    net, memory, _ = personalised()
    clients = Clients(FedL2P(**SMALL))
    parts = in_two(clients.fresh("a"), 0.2, 0)
    expected = rate_multiples(net, features(parts))
    assert torch.allclose(memory["multiples/all/rate"], expected, rtol=1e-5)


def test_features_and_the_final_training_see_nothing_of_what_is_held_out() -> None:
    _, memory, adapter = personalised()
    _, held, same = personalised("val")
    assert_same(held, memory)
    assert_same(same, adapter)
    _, seen, other = personalised("train")
    assert not torch.equal(seen["multiples/all/rate"], memory["multiples/all/rate"])
    assert all(not torch.equal(other[key], adapter[key]) for key in adapter if key.endswith("/B"))


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
    """Steps with a fast eta, on labels that are the same for all examples: more training is better."""
    site, _, net, features = prepared()
    examples = site.examples("train")
    examples.columns["labels"].zero_()  # type: ignore[attr-defined]
    parts = in_two(site, 0.25, 0)
    start = validation_after(site, parts, rate_multiples(net, features))
    ends = {}
    for released in (False, True):
        how = MetaStep(outer=8, draws=4, terms=3, psi=0.1, lr_eta=0.1, released=released)
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
    state = Payload(net, {"stale": 0}).with_part("best", Payload(net))
    for number, loss in enumerate(losses, start=1):
        arrays = {key: torch.full_like(value, float(number)) for key, value in net.items()}
        reply = Update(ClientInfo("a", "tiny", 4), Payload({**arrays, LOSS: torch.tensor([loss])}))
        state = federated(method).aggregate(state, [reply], None, Tick("meta", number, 99, 0))  # type: ignore[arg-type]
    return state


def test_training_stops_after_exactly_so_many_rounds_without_a_lower_loss_and_the_best_network_stays() -> None:
    method = FedL2P(patience=50)
    almost, over = server_after(method, [2.0, 1.0, *[1.0] * 49]), server_after(method, [2.0, 1.0, *[1.5] * 60])
    info = ClientInfo("a", "tiny", 4)
    assert almost.scalars["stale"] == 49 and not federated(method).dispatch(almost, info, AT).scalars["stopped"]
    assert over.scalars["stale"] == 50 and federated(method).dispatch(over, info, AT).scalars["stopped"]
    assert float(over.arrays[ETA][0]) == 52  # rounds after the fiftieth change nothing
    assert float(over.part("best").arrays[ETA][0]) == 2 and over.scalars["lowest"] == 1.0


def test_clients_of_a_stopped_federation_reply_without_training() -> None:
    clients = Clients(FedL2P(**SMALL, patience=1))
    method = clients.method
    net = clients.model.dump(slot(RATES))
    site = clients.fresh("a")
    memory, reply = finish(federated(method).client_update(Payload(), Payload(net, {"stopped": True}), site, AT))
    assert_same(reply.arrays, {**net, LOSS: torch.zeros(1)})
    assert not memory.arrays and not site.report


def test_a_run_sends_the_network_and_one_number_and_nothing_else() -> None:
    clients = Clients(FedL2P(**SMALL))
    server = clients.run()
    assert not clients.journal.failures
    for at, update in clients.journal.updates:
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


def test_rounds_and_the_final_training_are_on_top_of_the_base() -> None:
    clients = Clients(FedL2P(**SMALL, base={"name": "fedit", "rank": 2}))
    clients.run(rounds=1)
    assert not clients.journal.failures
    memory = clients.memory("a").arrays
    base = {key.removeprefix("fixed@"): value for key, value in memory.items() if key.startswith("fixed@")}
    site = clients.fresh("a")
    site.model.load(base)
    parts, net = in_two(site, 0.2, 0), select(clients.initial, slot(RATES))
    new, loss = improve(parts, AT, net, features(parts, "shared"), MetaStep(draws=2), BUDGET.max_steps, ("shared",))
    assert_near(clients.uploads(1, "meta")["a"], {**new, LOSS: torch.tensor([loss])})
    at = Tick("budget", 1, 1, 0)
    batches = parts.batches("train", BUDGET.max_steps, at)
    train_at(parts, rated_optimiser(site), memory["multiples/all/rate"], batches, lambda step: BUDGET.lr, ("shared",))
    assert_near(select(memory, slot(BUDGETED)), site.model.dump(slot(BUDGETED)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"validation": 1.0}, "validation: must be above 0"),
        ({"outer": 0}, "outer: must be positive"),
        ({"patience": 0}, "patience: must be positive"),
        ({"terms": -1}, "terms: must be 0 or more"),
        ({"psi": 0.0}, "psi: must be positive"),
        ({"base": {"name": "fedl2p"}}, "has a stage"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_method({"name": "fedl2p", **arguments})


def test_a_stream_is_refused_before_anything_is_trained() -> None:
    settings = {"benchmark": {"name": "digits", "clients": 2}, "method": "fedl2p", "stream": {"kind": "static"}}
    with pytest.raises(ConfigError, match=r"stream\.kind: FedL2P holds a part of all training examples out"):
        check(settings)
