"""PerAda and TAKFL at the server, with two backbones and with one (docs/methods/perada.md, takfl.md)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import select, slot, slot_of
from befit.core.errors import ConfigError
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.distil.ensemble import budget_of
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import Student
from befit.methods.parts.distil.translate import View
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Backbone, ServerSite
from tests.federation import FAMILIES, LARGE, SMALL, Families
from tests.tiny import assert_near, assert_same, federated, tiny_examples
from tests.unit.methods.parts.distil.families import ALIKE, RECORDS, SGD, started

WHOLE = {"samples": RECORDS, "batch_size": RECORDS}  # one step, on all public records
EXAMPLES = tiny_examples("llama", RECORDS, 99)
BATCH = EXAMPLES.batch(range(RECORDS))


def rows(one: Backbone, state: State, name: str = "shared") -> Tensor:
    """A plain forward pass of all public records: the logits of every answer token."""
    with torch.no_grad(), one.model.using(state, name):
        logits = one.model.backbone(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    return logits[:, :-1][BATCH["labels"][:, 1:] != -100]


def averages(updates: Mapping[str, Update], family: str) -> State:
    states = [update.payload.arrays for client, update in updates.items() if FAMILIES[client] == family]
    return {key: sum(state[key] for state in states) / len(states) for key in states[0]}  # type: ignore[misc]


def shared(federation: Families, family: str) -> State:
    return select(federation.server.part(family).arrays, slot("shared"))


def sgd_step(one: Backbone, start: State, target: Tensor, temperature: float, factor: float) -> State:
    """One step of SGD by hand on `factor * mean over tokens of cross-entropy(target, softmax(s / T))`."""
    model = one.model
    model.load(start)
    with model.active("shared"), model.trainable(slot("shared")):
        logits = model.backbone(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
        own = logits[:, :-1][BATCH["labels"][:, 1:] != -100] / temperature
        leaves = model.leaves(slot("shared"))
        loss = -factor * (target * own.log_softmax(-1)).sum(-1).mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {key: start[key] - SGD.lr * gradient for key, gradient in zip(leaves, gradients, strict=True)}


def test_perada_takes_a_step_towards_the_mean_of_all_clients_logits_without_the_factor() -> None:
    """Against plain loops: five clients on two backbones, each counting once, at T = 2."""
    federation = started("perada", distil=WHOLE)
    updates = federation.round(1)
    logits = [rows(federation.backbones[FAMILIES[c]], update.payload.arrays) for c, update in updates.items()]
    target = (torch.stack(logits).mean(0) / 2).softmax(-1)
    for family, one in federation.backbones.items():
        expected = sgd_step(one, averages(updates, family), target, 2.0, 1.0)
        assert_near(shared(federation, family), expected)


def test_perada_brings_every_average_nearer_to_what_all_clients_say() -> None:
    federation = started("perada", distil={**WHOLE, "epochs": 20, "lr": 0.5})
    updates = federation.round(1)
    logits = [rows(federation.backbones[FAMILIES[c]], update.payload.arrays) for c, update in updates.items()]
    mean = (torch.stack(logits).mean(0) / 2).log_softmax(-1)
    for family, one in federation.backbones.items():
        before, after = (
            float((mean.exp() * (mean - (rows(one, state) / 2).log_softmax(-1))).sum(-1).mean())
            for state in (averages(updates, family), shared(federation, family))
        )
        assert after < 0.9 * before


def test_peradas_clients_are_dittos_and_what_is_personal_stays_with_them() -> None:
    """In the first round to the bit; later the shared adapter they receive is another one."""
    perada, ditto = started("perada", distil=WHOLE), started("ditto")
    first, other = perada.round(1), {c: ditto.update(c, 1)[1] for c in "a"}
    assert_same(first["a"].payload.arrays, other["a"].payload.arrays)
    assert {slot_of(key) for update in first.values() for key in update.payload.arrays} == {"shared"}
    assert {slot_of(key.partition("@")[2]) for key in perada.server.arrays} == {"shared"}


def test_peradas_legacy_flag_averages_what_should_be_personal_inside_a_family_and_teaches_nobody_else() -> None:
    """With it, a client begins a round with the mean of its family's personal adapters. What is distilled
    is the same: in the first round, where all begin alike, to the bit; in whatever order the arrays arrive."""
    legacy, plain = (started("perada", distil=WHOLE, legacy_average_personal=one) for one in (True, False))
    plain.round(1)
    sent = {client: legacy.update(client, 1)[1] for client in FAMILIES}
    turned = [Update(one.client, Payload(dict(reversed(one.payload.arrays.items())))) for one in sent.values()]
    assert [slot_of(next(iter(one.payload.arrays))) for one in turned] == ["personal"] * 5
    legacy.server = federated(legacy.method).aggregate(legacy.server, turned, legacy.server_site, legacy.tick(1))
    for family in legacy.backbones:
        assert_same(shared(legacy, family), shared(plain, family))
        mean = select(averages(sent, family), slot("personal"))
        assert_near(select(legacy.server.part(family).arrays, slot("personal")), mean)
    for client in "ab":
        received, _ = legacy.update(client, 2)
        assert_same(received.arrays, legacy.server.part(FAMILIES[client]).arrays)
        assert not select(legacy.memory(client).arrays, slot("personal"))
    assert len(select(sent["a"].payload.arrays, slot("personal"))) == len(
        select(plain.memory("a").arrays, slot("personal"))
    )


def test_without_a_penalty_peradas_personal_adapter_does_not_see_the_shared_one() -> None:
    """However hard the server distils, and whoever else there is."""
    found = []
    for rate in (1e-6, 2.0):
        federation = started("perada", mu=0.0, distil={**WHOLE, "lr": rate})
        federation.round(1)
        federation.round(2)
        found.append(select(federation.memory("b").arrays, slot("personal")))
    assert_same(*found)


def test_takfls_first_step_is_the_mean_of_one_step_to_each_family() -> None:
    """From one average for every teacher (the student is set back between them), T^2 = 9 times the divergence; theta's
    own answers pull at nothing yet. Against plain loops."""
    federation = started("takfl", distil=WHOLE)
    updates = federation.round(1)
    targets = []
    for family, one in federation.backbones.items():
        logits = [rows(one, update.payload.arrays) for c, update in updates.items() if FAMILIES[c] == family]
        targets.append((torch.stack(logits).mean(0) / 3).softmax(-1))
    for family, one in federation.backbones.items():
        theta = averages(updates, family)
        states = [sgd_step(one, theta, target, 3.0, 9.0) for target in targets]
        vectors = [{key: state[key] - theta[key] for key in theta} for state in states]
        assert all(any(value.abs().max() > 1e-6 for value in vector.values()) for vector in vectors)
        expected = {key: theta[key] + sum(vector[key] for vector in vectors) / 2 for key in theta}
        assert_near(shared(federation, family), expected)  # type: ignore[arg-type]


def test_takfls_task_vectors_are_scaled_by_their_strength_and_none_is_fedit() -> None:
    states = {}
    for strength in (0.0, 0.5, 1.0):
        federation = started("takfl", strength=strength, distil={"samples": 6, "batch_size": 3})
        updates = federation.round(1)
        states[strength] = shared(federation, LARGE)
    start = averages(updates, LARGE)
    assert_near(states[0.0], start)
    half, whole = ({key: state[key] - start[key] for key in start} for state in (states[0.5], states[1.0]))
    assert_near({key: 2 * value for key, value in half.items()}, whole, atol=2e-6)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-4


def test_takfls_own_answers_hold_it_back() -> None:
    """Many steps: the more they count, the less of the way to the teachers is gone."""
    distances = []
    for weight in (0.0, 10.0):
        federation = started("takfl", own_weight=weight, distil={**WHOLE, "epochs": 4, "lr": 1e-3})
        updates = federation.round(1)
        theta = averages(updates, SMALL)
        moved = [(value - theta[key]).norm() for key, value in shared(federation, SMALL).items()]
        distances.append(float(torch.stack(moved).norm()))
    assert 0 < distances[1] < 0.9 * distances[0]


@pytest.mark.parametrize("name", ["perada", "takfl"])
def test_with_one_backbone_the_clients_mean_teaches_their_average(name: str) -> None:
    federation = started(name, families=ALIKE, distil=WHOLE)
    updates = federation.round(1, "ace")
    one, theta = federation.backbones[SMALL], averages(updates, SMALL)
    T = {"perada": 2.0, "takfl": 3.0}[name]
    mean = torch.stack([rows(one, update.payload.arrays) for update in updates.values()]).mean(0)
    expected = sgd_step(one, theta, (mean / T).softmax(-1), T, {"perada": 1.0, "takfl": 9.0}[name])
    assert_near(shared(federation, SMALL), expected)
    assert all((expected[key] - theta[key]).any() for key in theta if key.endswith("/B"))


@pytest.mark.parametrize("name", ["perada", "takfl"])
def test_a_family_of_which_nobody_replied_keeps_its_adapter_and_does_not_teach(name: str) -> None:
    federation = started(name, distil=WHOLE)
    before = shared(federation, LARGE)
    federation.round(1, "ac")
    assert_same(shared(federation, LARGE), before)
    alone = started(name, families=ALIKE, distil=WHOLE)
    alone.round(1, "ac")
    assert_same(shared(federation, SMALL), shared(alone, SMALL))


@pytest.mark.parametrize("name", ["perada", "takfl"])
def test_a_learning_rate_of_its_own_and_the_clients_one(name: str) -> None:
    found = []
    for rate in (None, SGD.lr, 1e-9):
        federation = started(name, distil={**WHOLE, "lr": rate})
        updates = federation.round(1)
        found.append(shared(federation, SMALL))
    assert_same(found[0], found[1])
    assert_near(found[2], averages(updates, SMALL))


def test_records_without_an_answer_teach_nothing() -> None:
    """As a public prompt that fills the model; the mean over no token is no number."""
    federation = started("perada", distil=WHOLE)
    one = federation.backbones[SMALL]
    start = select(federation.server.part(SMALL).arrays, slot("shared"))
    student = Student(one, start, SGD, SGD.lr)
    silent = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    student.step(View(one.task, silent), lambda rows: rows.mean())
    assert not student.losses and student.state is start
    student.step(View(one.task, BATCH), lambda rows: rows.mean())
    assert len(student.losses) == 1


def test_a_server_of_epochs_has_the_rate_that_clients_begin_with() -> None:
    """Two epochs of 6 and 10 records in batches of 2 are 6 and 10 steps: in the third round the warm-up is over."""
    budget = TrainSettings(epochs=2, batch_size=2, lr=1.0, warmup_steps=20)
    clients = (ClientInfo("a", "x", 6), ClientInfo("b", "x", 10))
    found = budget_of(ServerSite({}, clients, budget=budget))
    rates = [Distillation().rate(found, Tick("federate", round_, 4, 0)) for round_ in (1, 2, 3, 4)]
    assert rates == pytest.approx([1 / 20, 9 / 20, 17 / 20, 1.0])


def test_settings_that_cannot_work_are_refused_by_their_key() -> None:
    for block, problem in (
        ({"name": "perada", "temperature": 0.0}, "temperature: must be positive"),
        ({"name": "takfl", "strength": -1.0, "own_temperature": 0.0}, "strength: must be 0[^$]*own_temperature: must"),
        ({"name": "perada", "distil": {"samples": 0}}, "samples: must be positive"),
        ({"name": "takfl", "distil": {"lr": 0.0}}, "lr: must be positive"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_method(block)


def test_a_server_without_backbones_says_what_it_lacks() -> None:
    federation = started("perada", distil=WHOLE)
    updates = [federation.update("a", 1)[1]]
    bare = type(federation.server_site)(federation.server_site.starts, federation.server_site.clients, {}, None, SGD)
    with pytest.raises(ConfigError, match=r"no public records or not all backbones"):
        federated(federation.method).aggregate(Payload(federation.server.arrays), updates, bare, federation.tick(1))
