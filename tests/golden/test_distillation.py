"""Learning from what models say of public records, at the server and at clients: PerAda, TAKFL, FedMKT.

Every round by dense weights, `torch.optim` and a loop; a step of the distillation is on all public records.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden.play import CLIENTS, LORA, PUBLIC, Played
from tests.golden.reference import (
    STEPS,
    Arrays,
    Learner,
    assert_near,
    change,
    logits,
    loss,
    mean,
    soft_loss,
    trained,
)

CHECKED = {"perada": "by hand", "takfl": "by hand", "fedmkt": "by hand"}
DISTIL = {"samples": PUBLIC, "batch_size": PUBLIC, "epochs": 2}


def answers_of(states: list[Arrays], pixels: Tensor) -> Tensor:
    """Mean logits of several adapters."""
    return torch.stack([logits(pixels, change(one)) for one in states]).mean(0)


def assert_answers(played: Played, client: str, adapter: Arrays) -> None:
    pixels, _ = played.data(client, "test")
    torch.testing.assert_close(played.answers(client), logits(pixels, change(adapter)), rtol=1e-3, atol=3e-4)


def test_perada() -> None:
    """Xie et al. 2024, Algorithm 1: clients as in Ditto; the mean adapter then learns at the server
    `KL(softmax(t / T) || softmax(s / T))`, t the mean logits of the clients' shared adapters."""
    T = 2.0
    played = Played({"name": "perada", **LORA, "mu": 0.7, "temperature": T, "distil": DISTIL})
    pixels, _ = played.public
    common = played.start("shared")
    personal = {client: Learner(played.start("personal")) for client in CLIENTS}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            data, shared, own = played.data(client), Learner(common), personal[client]
            for _ in range(STEPS):
                shared.step(loss(data, change(shared.arrays)))
                pull = sum((own.arrays[key] - common[key]).square().sum() for key in common)
                own.step(loss(data, change(own.arrays)) + 0.7 * pull)
            each.append(shared.now)
            assert_near(played.sent(round_, client), each[-1])
        target = (answers_of(each, pixels) / T).softmax(-1)
        common = trained(mean(each), lambda student: soft_loss(target, logits(pixels, change(student)) / T), steps=2)
    for client in CLIENTS:
        assert_near(played.kept(client, "personal"), personal[client].now)
        assert_answers(played, client, personal[client].now)


@pytest.mark.parametrize("own_weight", [0.01, 0.5])
def test_takfl(own_weight: float) -> None:
    """Morafah et al. 2024, Algorithm 1, with one family: `theta_1` learns `T^2 KL_T(mean of
    clients) + w T'^2 KL_T'(what theta itself says)` from theta, the mean; the server's is `theta + lambda (theta_1 -
    theta)`."""
    T, other, strength = 3.0, 20.0, 0.6
    block = {"name": "takfl", **LORA, "own_weight": own_weight, "strength": strength, "distil": DISTIL}
    played = Played(block)
    pixels, _ = played.public
    common = played.start("shared")
    for round_ in (1, 2):
        each = [trained(common, lambda own: loss(played.data(c), change(own))) for c in CLIENTS]
        for client, expected in zip(CLIENTS, each, strict=True):
            assert_near(played.sent(round_, client), expected, atol=5e-5)
        theta, said = mean(each), answers_of(each, pixels)
        itself = answers_of([theta], pixels)

        def objective(student: Arrays) -> Tensor:
            rows = logits(pixels, change(student))
            taught = soft_loss((said / T).softmax(-1), rows / T)
            kept = soft_loss((itself / other).softmax(-1), rows / other)
            return T**2 * taught + own_weight * other**2 * kept

        learnt = trained(theta, objective, steps=2)
        common = {key: value + strength * (learnt[key] - value) for key, value in theta.items()}
    for client in CLIENTS:
        assert_answers(played, client, common)


def test_fedmkt() -> None:
    """Fan et al. 2025, DualMinCE, with one tokenizer: of each record the client with the lowest loss teaches the
    server's model, where that is below the server's own loss; a client learns from the server's model where that one's
    is below its own. Cross-entropy at temperature 1, by an optimiser of its own, before a client's ordinary steps."""
    played = Played({"name": "fedmkt", **LORA, "distil": DISTIL}, rounds=3)
    pixels, labels = played.public

    def says(adapter: Arrays) -> tuple[Tensor, Tensor]:
        """Probabilities and losses of all public records."""
        rows = logits(pixels, change(adapter))
        return rows.softmax(-1), F.cross_entropy(rows, labels, reduction="none")

    def learns(start: Arrays, target: Tensor, better: Tensor) -> Arrays:
        if not better.any():
            return start
        return trained(start, lambda own: soft_loss(target[better], logits(pixels[better], change(own))), steps=2)

    server, taught = played.start("personal"), None
    own = {client: Learner(played.start("personal")) for client in CLIENTS}
    losses: dict[str, Tensor] = {}
    lessons = []
    for round_ in (1, 2, 3):
        told = {}
        for client in CLIENTS:
            learner = own[client]
            if taught is not None:
                lessons.append(taught[1] < losses[client])
                learner.put(learns(learner.now, taught[0], lessons[-1]))
            for _ in range(STEPS):
                learner.step(loss(played.data(client), change(learner.arrays)))
            told[client], losses[client] = says(learner.now)
            sent = played.sent(round_, client, "knowledge")
            torch.testing.assert_close(sent["public/losses"], losses[client], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(sent["public/values"][:, 0], told[client], rtol=1e-3, atol=1e-4)
        best = torch.stack([losses[client] for client in CLIENTS])
        lowest, who = best.min(0)
        target = torch.stack([told[client] for client in CLIENTS])[who, torch.arange(PUBLIC)]
        before = says(server)[1] if taught is None else taught[1]
        server = learns(server, target, lowest < before)
        taught = says(server)
    assert any(0 < int(one.sum()) < PUBLIC for one in lessons)
    for client in CLIENTS:
        assert_near(played.kept(client, "personal"), own[client].now, atol=1e-4)
        assert_answers(played, client, own[client].now)
