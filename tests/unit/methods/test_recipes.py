"""FedIT, FedSA, Ditto, FedALT, FedAvg, DEPT and FedDPA-T: each round against the round written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, Selector, factor, select, slot, slot_of, to_slot
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.recipe.personal import LocalTraining
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import LeaveOneOut
from befit.protocol.federate import final_download
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.train.loop import Pass, train
from tests.conftest import assert_near, assert_same, federated
from tests.unit.methods.federation import BUDGET, Clients

SHARED = Pass(slot("shared"), ("shared",))


def trained_alone(clients: Clients, client: str, start: State, at: Tick) -> State:
    """What the client has after its steps from `start`."""
    site = clients.fresh(client)
    site.model.load(start)
    train(site, [SHARED], at)
    return site.model.dump(slot("shared"))


def step_by_hand(
    site: Site, optimiser: torch.optim.Optimizer, chosen: Selector, active: tuple[str, ...], at: Tick
) -> None:
    """A round's steps on the task's loss: what a pass is, without the training loop."""
    for batch in site.batches("train", BUDGET.max_steps, at):
        site.model.zero_gradients()
        with site.model.training(True), site.model.active(*active), site.model.trainable(chosen):
            site.loss(batch).backward()
        optimiser.step()


def by_hand(clients: Clients, client: str, start: State, at: Tick, *parts: tuple[str, tuple[str, ...], float]) -> State:
    """What the client has from `start` after a round of AdamW for each part: its slot, those active, its rate."""
    site = clients.fresh(client)
    site.model.load(start)
    for trained, active, rate in parts:
        chosen = slot(trained)
        optimiser = torch.optim.AdamW(site.model.parameters(chosen), rate, weight_decay=0.0)
        step_by_hand(site, optimiser, chosen, active, at)
    return site.model.dump(EVERYTHING)


def mean_by_hand(states: list[State], weights: list[float]) -> State:
    total = sum(weights)
    return {
        key: sum(
            (state[key].double() * (w / total) for state, w in zip(states, weights, strict=True)),
            torch.zeros((), dtype=torch.float64),
        ).float()
        for key in states[0]
    }


@pytest.mark.parametrize(("weights", "shares"), [("examples", [6.0, 9.0, 12.0]), ("uniform", [1.0, 1.0, 1.0])])
def test_a_round_of_fedit_is_the_weighted_mean_of_what_each_client_trained(weights: str, shares: list[float]) -> None:
    clients = Clients(build_method({"name": "fedit", "rank": 2, "weights": weights}))
    server = clients.run(rounds=2)
    expected = select(clients.initial, slot("shared"))
    for number in (1, 2):
        at = Tick("federate", number, 2, 0)
        each = [trained_alone(clients, name, expected, at) for name in "abc"]
        for name, state in zip("abc", each, strict=True):
            assert_near(clients.uploads(number)[name], state, atol=1e-5)
        expected = mean_by_hand(list(clients.uploads(number).values()), shares)
    assert_near(server.arrays, expected, atol=1e-7)
    assert not any(memory.arrays for memory in (clients.memory(name) for name in "abc"))


def one_client(method: Method, budget: TrainSettings, rounds: int) -> tuple[Payload, Payload]:
    """The memories of the server and of the only client after a run."""
    clients = Clients(method, count=1)
    clients.sites["a"] = replace(clients.sites["a"], budget=budget)
    return clients.run(rounds=rounds), clients.memory("a")


SGD = replace(BUDGET, optimiser="sgd", momentum=0.0)


@pytest.mark.parametrize(
    ("settings", "budget", "rounds", "same"),
    [
        ({"keep_optimiser": True}, BUDGET, 3, True),
        ({}, SGD, 3, True),
        ({}, BUDGET, 1, True),
        ({}, BUDGET, 2, False),  # fresh moments in the second round
        ({}, replace(SGD, momentum=0.9), 2, False),
        ({"keep_optimiser": True}, replace(SGD, momentum=0.9), 3, True),
    ],
    ids=["kept", "sgd", "one round", "fresh", "fresh momentum", "kept momentum"],
)
def test_fedit_with_one_client_is_local_training_to_the_bit(
    settings: dict[str, Any], budget: TrainSettings, rounds: int, same: bool
) -> None:
    """FedMosaic specification, property 14: "FedIT with one client = SFT"."""
    alone = build_method({"name": "local", "rank": 2})
    assert isinstance(alone, Recipe) and isinstance(alone.before[0], LocalTraining)
    alone = replace(alone, before=(replace(alone.before[0], name="federate"),))  # batches are drawn by this name
    _, memory = one_client(alone, budget, rounds)
    server, _ = one_client(build_method({"name": "fedit", "rank": 2, **settings}), budget, rounds)
    trained = select(memory.arrays, slot("personal"))
    assert {to_slot(key, "personal") for key in server.arrays} == trained.keys()
    assert all(torch.equal(trained[to_slot(key, "personal")], value) for key, value in server.arrays.items()) == same


def test_fedit_with_a_cohort_averages_only_those_that_took_part() -> None:
    clients = Clients(build_method({"name": "fedit", "rank": 2}))
    server = clients.run(rounds=1, cohort=2)
    uploads = clients.uploads(1)
    assert len(uploads) == 2
    shares = [float(clients.sites[name].info.num_examples) for name in uploads]
    assert_near(server.arrays, mean_by_hand(list(uploads.values()), shares), atol=1e-7)


def test_fedsa_sends_A_only_and_each_client_keeps_its_own_B_and_head() -> None:
    clients = Clients(build_method({"name": "fedsa", "rank": 2}))
    server = clients.run(rounds=3)
    own = {name: select(clients.initial, slot("shared") & ~factor("A")) for name in "abc"}
    common = select(clients.initial, factor("A"))
    for number in (1, 2, 3):
        at = Tick("federate", number, 3, 0)
        uploads = clients.uploads(number)
        for name in "abc":
            after = trained_alone(clients, name, {**common, **own[name]}, at)
            own[name] = select(after, ~factor("A"))
            assert uploads[name].keys() == common.keys()
            assert_near(uploads[name], select(after, factor("A")), atol=1e-5)
        common = mean_by_hand(list(uploads.values()), [6.0, 9.0, 12.0])
    assert_near(server.arrays, common, atol=1e-5)
    for name in "abc":
        assert_near(clients.memory(name).arrays, own[name], atol=1e-5)
    for rows in clients.outbound.as_dict().values():
        assert all(row["name"].endswith("/A") for row in rows if row["shape"])
    heads = [clients.memory(name).arrays["shared/classifier/weight"] for name in "abc"]
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("scale", [0.1, 0.5])
@pytest.mark.parametrize("name", ["fedavg", "dept"])
def test_all_weights_learn_at_their_part_of_the_rate_and_in_dept_each_client_keeps_its_embeddings(
    name: str, scale: float
) -> None:
    """0.1 is the default. An embedding is what the specification's code takes for one: by its name."""
    clients = Clients(build_method({"name": name} if scale == 0.1 else {"name": name, "lr_scale": scale}))
    clients.run(rounds=2)
    own_keys = {key for key in clients.initial if name == "dept" and "_embeddings" in key}
    assert bool(own_keys) == (name == "dept")
    common = {key: value for key, value in clients.initial.items() if key not in own_keys}
    own = {client: {key: clients.initial[key] for key in own_keys} for client in "abc"}
    for number in (1, 2):
        at, sent = Tick("federate", number, 2, 0), clients.uploads(number)
        for client in "abc":
            part = ("shared", ("shared",), scale * BUDGET.lr)
            after = by_hand(clients, client, {**common, **own[client]}, at, part)
            own[client] = {key: after[key] for key in own_keys}
            assert sent[client].keys() == common.keys()
            # A bias of the keys changes no attention: its gradient is rounding, whose sign Adam follows.
            seen = {key: value for key, value in sent[client].items() if not key.endswith("k_proj/bias")}
            assert_near(seen, {key: after[key] for key in seen}, atol=1e-5)
        common = mean_by_hand(list(sent.values()), [6.0, 9.0, 12.0])
    for client in "abc" if name == "dept" else "":
        assert_near(clients.memory(client).arrays, own[client], atol=1e-5)


def test_feddpa_t_trains_the_personal_adapter_after_the_shared_one_and_on_top_of_it() -> None:
    clients = Clients(build_method({"name": "feddpa_t", "rank": 2}))
    server = clients.run(rounds=2)
    common = select(clients.initial, slot("shared"))
    own = {name: select(clients.initial, slot("personal")) for name in "abc"}
    parts = ("shared", ("shared",), BUDGET.lr), ("personal", ("shared", "personal"), BUDGET.lr)
    for number in (1, 2):
        at, sent = Tick("federate", number, 2, 0), clients.uploads(number)
        for name in "abc":
            after = by_hand(clients, name, {**common, **own[name]}, at, *parts)
            assert_near(sent[name], select(after, slot("shared")), atol=1e-5)
            own[name] = select(after, slot("personal"))
        common = mean_by_hand(list(sent.values()), [6.0, 9.0, 12.0])
    at = Tick("federate", 2, 2, 0)
    for name, info in zip("abc", clients.infos, strict=True):
        deployed = clients.engine.deployment(name, final_download(clients.method, server, info, at), at)
        assert (deployed.slots, deployed.mixer) == (("shared", "personal"), "sum")
        assert_near(dict(deployed.arrays), {**common, **own[name]}, atol=1e-5)
    assert not torch.equal(own["a"]["personal/block.00.q_proj/B"], own["b"]["personal/block.00.q_proj/B"])


def update_of(method: Method, clients: Clients, received: State, at: Tick) -> tuple[Payload, Payload]:
    site = clients.fresh("a")
    return federated(method).client_update(Payload(), Payload(received), site, at)


@pytest.mark.parametrize("mu", [0.0, 5.0])
def test_dittos_personal_adapter_depends_on_the_shared_one_through_mu_alone(mu: float) -> None:
    method = build_method({"name": "ditto", "rank": 2, "mu": mu})
    clients, at = Clients(method), Tick("federate", 1, 2, 0)
    first = select(clients.initial, slot("shared"))
    second = {key: tensor + 0.5 for key, tensor in first.items()}
    one, other = (update_of(method, clients, received, at) for received in (first, second))
    personal = [{k: t for k, t in kept.arrays.items() if k.startswith("personal/")} for kept, _ in (one, other)]
    if mu == 0.0:
        assert_same(*personal)
    else:
        gaps = [
            sum(float((p[key] - received[to_slot(key, "shared")]).square().sum()) for key in p)
            for p, received in ((personal[0], second), (personal[1], second))
        ]
        assert gaps[1] < gaps[0]


def test_dittos_shared_adapter_is_that_of_fedit_whatever_mu_is() -> None:
    fedit = Clients(build_method({"name": "fedit", "rank": 2})).run()
    for mu in (0.0, 5.0):
        ditto = Clients(build_method({"name": "ditto", "rank": 2, "mu": mu}))
        assert_same(ditto.run().arrays, fedit.arrays)
        assert all(slot_of(key) == "shared" for key in ditto.uploads(1)["a"])


@pytest.mark.parametrize(
    ("method", "stage"), [({"name": "ditto", "mu": 0.0}, "federate"), ({"name": "local"}, "local")]
)
def test_a_personal_adapter_is_trained_as_one_uninterrupted_run_would(method: dict[str, object], stage: str) -> None:
    clients = Clients(build_method({**method, "rank": 2}))
    clients.run(rounds=2)
    site, chosen = clients.fresh("b"), slot("personal")
    model = site.model
    optimiser = torch.optim.AdamW(model.parameters(chosen), BUDGET.lr, weight_decay=0.0)
    for number in (1, 2):
        step_by_hand(site, optimiser, chosen, ("personal",), Tick(stage, number, 2, 0))
    kept = {key: tensor for key, tensor in clients.memory("b").arrays.items() if key.startswith("personal/")}
    assert_same(kept, model.dump(chosen))


def test_fedalt_gives_everybody_the_mean_of_the_others_and_the_sums_agree() -> None:
    clients = Clients(build_method({"name": "fedalt", "rank": 2}), count=4)
    method = clients.method
    start = method.server_init(clients.server_site)
    at = Tick("federate", 1, 2, 0)
    assert all(not federated(method).dispatch(start, info, at).arrays for info in clients.infos)
    server = clients.run(rounds=2)
    individual = clients.uploads(2)
    world = {info.id: federated(method).dispatch(server, info, at).arrays for info in clients.infos}
    for key in individual["a"]:
        mine = torch.stack([individual[name][key] for name in "abcd"])
        theirs = torch.stack([world[name][to_slot(key, "shared")] for name in "abcd"])
        torch.testing.assert_close(theirs.sum(0), mine.sum(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs[1], mine[[0, 2, 3]].mean(0), rtol=1e-5, atol=1e-6)


def test_fedalt_trains_the_individual_adapter_and_a_gate_that_never_leaves() -> None:
    clients = Clients(build_method({"name": "fedalt", "rank": 2}))
    clients.run(rounds=2)
    for name in "abc":
        memory = clients.memory(name).arrays
        assert {slot_of(key) for key in memory} == {"personal", "gate"}
        assert all(not torch.equal(tensor, clients.initial[key]) for key, tensor in memory.items())
        # the individual adapter is never overwritten by what comes down
        assert_same(select(memory, slot("personal")), clients.uploads(2)[name])
    leaving = {row["name"] for rows in clients.outbound.as_dict().values() for row in rows if row["shape"]}
    assert leaving and all(name.startswith("personal/") for name in leaving)


def test_fedalts_rest_of_the_world_gets_no_gradient() -> None:
    method = build_method({"name": "fedalt", "rank": 2})
    clients = Clients(method)
    received = {key: tensor + 0.1 for key, tensor in clients.initial.items() if key.startswith("shared/")}
    site = clients.fresh("a")
    federated(method).client_update(Payload(), Payload(received), site, Tick("federate", 1, 1, 0))
    assert_same(site.model.dump(slot("shared")), received)
    for key, leaf in site.model.leaves(EVERYTHING).items():
        assert leaf.grad is not None
        assert bool(leaf.grad.any()) == (slot_of(key) != "shared"), key


def upload(client: str, value: float) -> Update:
    return Update(ClientInfo(client, "", 1), Payload({"personal/m/A": torch.full((2, 2), value)}))


def received_by(server: Payload, client: str) -> float | None:
    arrays = LeaveOneOut().dispatch(server, ClientInfo(client, "", 1)).arrays
    return float(arrays["shared/m/A"][0, 0]) if arrays else None


def test_leaving_one_out_keeps_the_last_upload_of_clients_that_stay_away() -> None:
    """Round 1: a=1, b=3. Round 2: only b=5. Round 3: only c=6. d never takes part."""
    route, merge = LeaveOneOut(), build_method("fedit").merge  # type: ignore[attr-defined]
    server = route.initial(Payload())
    assert [received_by(server, name) for name in "abd"] == [None, None, None]
    alone = route.absorb(server, [upload("a", 1.0)], merge)
    assert received_by(alone, "a") is None and received_by(alone, "b") == 1.0
    server = route.absorb(server, [upload("a", 1.0), upload("b", 3.0)], merge)
    assert [received_by(server, name) for name in "abd"] == [3.0, 1.0, 2.0]
    server = route.absorb(server, [upload("b", 5.0)], merge)
    assert [received_by(server, name) for name in "abd"] == [5.0, 1.0, 3.0]
    server = route.absorb(server, [upload("c", 6.0)], merge)
    assert [received_by(server, name) for name in "abcd"] == [5.5, 3.5, 3.0, 4.0]
