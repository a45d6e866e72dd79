"""LoRA trained alone, averaged, and averaged in part: every round by dense weights, `torch.optim` and a loop.

LoRA: Hu et al. 2021, eq. 3. FedAvg: McMahan et al. 2017, Algorithm 1; FedIT (Zhang et al. 2024) is that of A and B.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played
from tests.golden.reference import (
    RATE,
    WEIGHTS,
    Arrays,
    Learner,
    assert_near,
    change,
    logits,
    loss,
    mean,
    only,
    sgd,
    trained,
)

CHECKED = {
    "local": "by hand",
    "lora": "by hand",
    "fedit": "by hand",
    "fedsa": "by hand",
    "ffa_lora": "by hand",
    "fedavg": "by hand",
    "dept": "by hand",
    "fedprox": "by hand",
    "ditto": "by hand",
    "feddpa_t": "by hand",
}


def assert_answers(played: Played, client: str, *changes: Arrays) -> None:
    pixels, _ = played.data(client, "test")
    torch.testing.assert_close(played.answers(client), logits(pixels, *changes), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("block", "slot"),
    [({"name": "local", **LORA}, "personal"), ({"name": "lora", "rank": 2, "scale": 2.0}, "budgeted")],
)
def test_training_alone_is_one_uninterrupted_run_of_AdamW(block: dict[str, Any], slot: str) -> None:
    """Two rounds of three steps are six steps of one optimiser (Loshchilov and Hutter 2019, Algorithm 2)."""
    played = Played(block)
    for client in CLIENTS:
        expected = trained(played.start(slot), lambda own: loss(played.data(client), change(own)), steps=6)
        assert_near(played.kept(client, slot), expected)
        assert_answers(played, client, change(expected))
    assert not any(update.payload.arrays for _, update in played.journal.updates)


@pytest.mark.parametrize(("weights", "shares"), [("examples", EXAMPLES), ("uniform", [1.0, 1.0, 1.0])])
def test_fedit(weights: str, shares: list[float]) -> None:
    """`theta = sum_k n_k / n theta_k` over factors, each client's from theta by a new optimiser."""
    played = Played({"name": "fedit", **LORA, "weights": weights})
    common = played.start("shared")
    for round_ in (1, 2):
        each = [trained(common, lambda own: loss(played.data(c), change(own))) for c in CLIENTS]
        for client, expected in zip(CLIENTS, each, strict=True):
            assert_near(played.sent(round_, client), expected)
        common = mean(each, shares)
    for client in CLIENTS:
        assert_answers(played, client, change(common))


def test_fedsa() -> None:
    """Guo et al. 2025, Figure 1c: A is averaged, each client keeps B, and here the head with it."""
    played = Played({"name": "fedsa", **LORA})
    start = played.start("shared")
    common, own = only(start, "/A"), dict.fromkeys(CLIENTS, only(start, "/B", "/weight", "/bias"))
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            after = trained({**common, **own[client]}, lambda own: loss(played.data(client), change(own)))
            each.append(only(after, "/A"))
            own[client] = only(after, "/B", "/weight", "/bias")
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_answers(played, client, change({**common, **own[client]}))


def test_ffa_lora() -> None:
    """Sun et al. 2024; Guo et al. 2025, Figure 1b: A stays at its start, B is trained and averaged."""
    played = Played({"name": "ffa_lora", **LORA})
    frozen, common = only(played.start("shared"), "/A"), only(played.start("shared"), "/B", "/weight", "/bias")
    for round_ in (1, 2):
        each = [trained(common, lambda own: loss(played.data(c), change({**frozen, **own}))) for c in CLIENTS]
        for client, expected in zip(CLIENTS, each, strict=True):
            assert_near(played.sent(round_, client), expected)
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_answers(played, client, change({**frozen, **common}))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("name", ["fedavg", "dept"])
def test_all_weights(name: str, scale: float | None) -> None:
    """FedAvg of every parameter, at a part of the rate, by default a tenth; in DEPT (Iacob et al. 2025, variant SPEC)
    without the embeddings, which stay with each client. What travels is the difference from the backbone."""
    played = Played({"name": name, **({"lr_scale": scale} if scale else {})}, optimiser="sgd")
    common = {key: torch.zeros_like(value) for key, value in WEIGHTS.items()}
    apart = [key for key in common if name == "dept" and "_embeddings" in key]
    assert len(apart) == (3 if name == "dept" else 0)
    theirs = {key: common.pop(key) for key in apart}
    own = dict.fromkeys(CLIENTS, theirs)
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            after = trained(
                {**common, **own[client]},
                lambda weights: loss(played.data(client), weights),
                lambda parameters: torch.optim.SGD(parameters, lr=RATE * (scale or 0.1)),
            )
            own[client] = {key: after.pop(key) for key in apart}
            each.append(after)
            sent = played.sent(round_, client)
            assert_near({key.replace("/", "."): value for key, value in sent.items()}, after)
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_answers(played, client, {**common, **own[client]})


def test_fedprox() -> None:
    """Li et al. 2020, eq. 2: `F_k(w) + mu / 2 ||w - w^t||^2`."""
    played = Played({"name": "fedprox", **LORA, "mu": 2.0})
    common = played.start("shared")
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            start = common

            def objective(own: Arrays) -> torch.Tensor:
                pull = sum((own[key] - start[key]).square().sum() for key in own)
                return loss(played.data(client), change(own)) + 2.0 / 2 * pull

            each.append(trained(start, objective))
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_answers(played, client, change(common))


def test_ditto() -> None:
    """Li et al. 2021, Algorithm 1, with the penalty `mu ||v - w||^2`, w as received, and one step of both a batch."""
    played = Played({"name": "ditto", **LORA, "mu": 0.7})
    common = played.start("shared")
    personal = {client: Learner(played.start("personal")) for client in CLIENTS}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            shared, own = Learner(common), personal[client]
            for _ in range(3):
                shared.step(loss(played.data(client), change(shared.arrays)))
                pull = sum((own.arrays[key] - common[key]).square().sum() for key in common)
                own.step(loss(played.data(client), change(own.arrays)) + 0.7 * pull)
            each.append(shared.now)
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_near(played.kept(client, "personal"), personal[client].now)
        assert_answers(played, client, change(personal[client].now))


def test_feddpa_t() -> None:
    """Lee et al. 2025a, Table 3: the shared adapter first, then the personal one on top of it as just
    trained, each by a new optimiser; the personal one has no head. Used are both."""
    played = Played({"name": "feddpa_t", **LORA})
    common, own = played.start("shared"), dict.fromkeys(CLIENTS, played.start("personal"))
    assert not any(key.startswith("classifier") for key in own["a"])
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            data = played.data(client)
            each.append(trained(common, lambda shared: loss(data, change(shared))))
            below = change(each[-1])
            own[client] = trained(own[client], lambda mine: loss(data, below, change(mine)))
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_near(played.kept(client, "personal"), own[client])
        assert_answers(played, client, change(common), change(own[client]))


def test_the_reference_learns() -> None:
    """Or all of the above would compare nothing with nothing."""
    played = Played({"name": "local", **LORA})
    data, start = played.data("a"), played.start("personal")
    before, after = (
        float(loss(data, change(one))) for one in (start, trained(start, lambda own: loss(data, change(own)), sgd))
    )
    assert after < before - 1e-3
