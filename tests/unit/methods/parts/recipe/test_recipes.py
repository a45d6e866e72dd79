"""FedIT, Ditto and FedALT with mini-batches, cohorts and one client. Their rounds by hand are in tests/golden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, factor, select, slot, slot_of, to_slot
from befit.core.values import ClientInfo, Payload, Tick, Update
from befit.methods.parts.recipe.personal import LocalTraining
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import Broadcast, LeaveOneOut
from befit.protocol.jobs import finish
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from tests.federation import BUDGET, Clients
from tests.golden.reference import mean
from tests.tiny import assert_near, assert_same, federated


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
    """FedIT with one client is training alone."""
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
    assert_near(server.arrays, mean(list(uploads.values()), shares), atol=1e-7)


@pytest.mark.parametrize(
    ("method", "stage"), [({"name": "ditto", "mu": 0.0}, "federate"), ({"name": "local"}, "local")]
)
def test_a_personal_adapter_is_trained_as_one_uninterrupted_run_would(method: dict[str, object], stage: str) -> None:
    clients = Clients(build_method({**method, "rank": 2}))
    clients.run(rounds=2)
    site, chosen = clients.fresh("b"), slot("personal")
    model = site.model
    optimiser = torch.optim.AdamW(model.parameters(chosen), BUDGET.lr, weight_decay=0.0, fused=True)
    for number in (1, 2):
        for batch in site.batches("train", BUDGET.max_steps, Tick(stage, number, 2, 0)):
            model.zero_gradients()
            with model.training(True), model.active("personal"), model.trainable(chosen):
                site.loss(batch).backward()
            optimiser.step()
    kept = {key: tensor for key, tensor in clients.memory("b").arrays.items() if key.startswith("personal/")}
    assert_same(kept, model.dump(chosen))


def test_fedalt_trains_the_individual_adapter_and_a_gate_that_never_leaves() -> None:
    clients = Clients(build_method({"name": "fedalt", "rank": 2}))
    clients.run(rounds=2)
    for name in "abc":
        memory = clients.memory(name).arrays
        assert {slot_of(key) for key in memory} == {"personal", "gate"}
        assert all(not torch.equal(tensor, clients.initial[key]) for key, tensor in memory.items())
        # the individual adapter is never overwritten by what comes down
        assert_same(select(memory, slot("personal")), clients.uploads(2)[name])
    leaving = {row["name"] for rows in clients.journal.outbound.as_dict().values() for row in rows if row["shape"]}
    assert leaving and all(name.startswith("personal/") for name in leaving)


def test_fedalts_rest_of_the_world_gets_no_gradient() -> None:
    method = build_method({"name": "fedalt", "rank": 2})
    clients = Clients(method)
    received = {key: tensor + 0.1 for key, tensor in clients.initial.items() if key.startswith("shared/")}
    site = clients.fresh("a")
    finish(federated(method).client_update(Payload(), Payload(received), site, Tick("federate", 1, 1, 0)))
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
    before = Payload(server.arrays)  # as runs kept it before the number of members was
    assert [received_by(before, name) for name in "abcd"] == [5.5, 3.5, 3.0, 4.0]


def test_what_arrives_in_another_slot_is_what_was_shared() -> None:
    whole, part = slot("personal"), slot("personal") & factor("A")
    for route in (Broadcast(to="shared"), LeaveOneOut(to="shared")):
        assert route.arrives(whole) == slot("shared")
        found = [key for key in KEYS if route.arrives(part)(key)]
        assert found == [key for key in KEYS if key.startswith("shared/") and key.endswith("/A")] and found
    assert LeaveOneOut().fewer(whole) == slot("shared")  # as long as nobody else has sent anything


KEYS = [f"{name}/block.00.{module}/{end}" for name in ("shared", "personal") for module in ("q", "v") for end in "AB"]
