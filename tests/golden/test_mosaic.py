"""RELA and FedMosaic (Seo et al. 2026) with one backbone: every round by dense weights, `torch.optim` and a loop.

The gate weighs the client's own adapter and the mixture of the others' (eq. 7); the mixture's weights are a softmax of
cosines between gradients of the bare model's last projection (eqs. 2 to 4). Noise is left out and all of the gradient
is sent, so that nothing is drawn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.play import CLIENTS, LORA, Played
from tests.golden.reference import (
    HEAD,
    MODULES,
    RATE,
    SCALE,
    STEPS,
    WEIGHTS,
    Arrays,
    Learner,
    assert_near,
    logits,
    loss,
    plus,
)

CHECKED = {"rela": "by hand", "fedmosaic": "by hand"}
TAU, PQ_RATE, PQ = 0.5, 2.5, ("block.01.q_proj", "block.01.v_proj")
LAST = "vit.layers.1.mlp.fc2.weight"


def update(adapter: Arrays, basis: Arrays, weight: dict[str, Tensor]) -> Arrays:
    """`weight s B A`, or in a PQ block `weight s B (P A x + Q)` (eq. 5), which has a part in the bias."""
    changes = {key.replace("/", "."): weight["classifier"] * adapter[key] for key in HEAD}
    for name, path in MODULES.items():
        if f"{name}/P" in adapter:
            A, B = basis[f"{name}/A"], basis[f"{name}/B"]
            changes[f"{path}.weight"] = weight[name] * SCALE * B @ adapter[f"{name}/P"] @ A
            changes[f"{path}.bias"] = weight[name] * SCALE * B @ adapter[f"{name}/Q"]
        else:
            changes[f"{path}.weight"] = weight[name] * SCALE * adapter[f"{name}/B"] @ adapter[f"{name}/A"]
    return changes


def gated(own: Arrays, mixture: Arrays, basis: Arrays) -> Arrays:
    """`h = W x + (1 - b) h_own + b h_mixture`, `b = sigmoid(beta)`, one beta for each module."""
    b = {
        key.removeprefix("gate ").removesuffix("/beta"): value.sigmoid() for key, value in own.items() if "beta" in key
    }
    return plus(update(own, basis, {name: 1 - value for name, value in b.items()}), update(mixture, basis, b))


def relevance(played: Played, include_self: bool) -> Tensor:
    """`W_ij = softmax_j(cos(G_i, G_j) / tau)`, by default without the client itself, as in the released code."""
    gradients = []
    for client in CLIENTS:
        weight = WEIGHTS[LAST].clone().requires_grad_(True)
        objective = loss(played.data(client), {LAST: weight - WEIGHTS[LAST]})
        gradients.append(torch.autograd.grad(objective, weight)[0].flatten())
    cosines = torch.stack([torch.stack([torch.cosine_similarity(g, h, dim=0) for h in gradients]) for g in gradients])
    if not include_self:
        cosines.fill_diagonal_(-torch.inf)
    return (cosines / TAU).softmax(1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rela", {}),
        ("rela", {"relevance": {"include_self": True}}),
        ("rela", {"mixing": "equal"}),
        ("fedmosaic", {"blocks": 1}),
    ],
    ids=["rela", "with itself", "equal", "fedmosaic"],
)
def test_a_run(name: str, options: dict[str, Any]) -> None:
    whole = {} if "mixing" in options else {"share": 1.0, "noise": 0.0, "every": 1, "temperature": TAU}
    played = Played({"name": name, **LORA, **options, "relevance": {**whole, **options.get("relevance", {})}}, rounds=3)
    basis = played.start("basis")
    start = {**played.start("personal"), **{f"gate {key}": value for key, value in played.start("gate").items()}}
    assert {key.rpartition("/")[0] for key in start if key.endswith(("/P", "/Q"))} == (set(PQ) if basis else set())
    W = relevance(played, bool(options.get("relevance")))
    W = torch.full_like(W, 0.5).fill_diagonal_(0.0) if "mixing" in options else W

    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        fast = [p for p, key in zip(parameters, start, strict=True) if key.endswith(("/P", "/Q"))]
        rest = [p for p, key in zip(parameters, start, strict=True) if not key.endswith(("/P", "/Q"))]
        groups = [{"params": rest, "lr": RATE}, *([{"params": fast, "lr": RATE * PQ_RATE}] if fast else [])]
        return torch.optim.AdamW(groups, weight_decay=0.0)

    own = {client: Learner(start, make) for client in CLIENTS}
    mixture = dict.fromkeys(CLIENTS, played.start("shared"))
    for round_ in (1, 2, 3):
        for client in CLIENTS:
            learner = own[client]
            for _ in range(STEPS):
                learner.step(loss(played.data(client), gated(learner.arrays, mixture[client], basis)))
            sent = {key: value for key, value in learner.now.items() if not key.startswith("gate")}
            assert_near(played.sent(round_, client, "personal"), sent, atol=1e-4)
        mixture = {
            client: {
                key: sum(W[i, j] * own[other].now[key] for j, other in enumerate(CLIENTS))  # type: ignore[misc]
                for key in mixture[client]
            }
            for i, client in enumerate(CLIENTS)
        }
    for client in CLIENTS:
        gates = {f"gate {key}": value for key, value in played.kept(client, "gate").items()}
        assert_near({**played.kept(client, "personal"), **gates}, own[client].now, atol=1e-4)
        assert all(bool(value.any()) for value in gates.values())
        pixels, _ = played.data(client, "test")
        expected = logits(pixels, gated(own[client].now, mixture[client], basis))
        torch.testing.assert_close(played.answers(client), expected, rtol=1e-3, atol=5e-4)


def test_training_alone_with_pq_blocks() -> None:
    """SFT with N_B blocks (Table 29): cores at their own rate between factors that stay as they are."""
    played = Played({"name": "local", **LORA, "blocks": 1, "pq_rate": PQ_RATE})
    basis, start = played.start("basis"), played.start("personal")
    assert {key.rpartition("/")[0] for key in start if key.endswith(("/P", "/Q"))} == set(PQ)
    full = dict.fromkeys([*MODULES, "classifier"], torch.tensor(1.0))

    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        fast = [p for p, key in zip(parameters, start, strict=True) if key.endswith(("/P", "/Q"))]
        rest = [p for p, key in zip(parameters, start, strict=True) if not key.endswith(("/P", "/Q"))]
        groups = [{"params": rest, "lr": RATE}, {"params": fast, "lr": RATE * PQ_RATE}]
        return torch.optim.AdamW(groups, weight_decay=0.0)

    for client in CLIENTS:
        learner = Learner(start, make)
        for _ in range(2 * STEPS):
            learner.step(loss(played.data(client), update(learner.arrays, basis, full)))
        assert_near(played.kept(client, "personal"), learner.now, atol=1e-4)
        pixels, _ = played.data(client, "test")
        expected = logits(pixels, update(learner.now, basis, full))
        torch.testing.assert_close(played.answers(client), expected, rtol=1e-3, atol=5e-4)


def test_clients_weigh_each_other_differently() -> None:
    """Or equal weights would pass for relevance."""
    W = relevance(Played({"name": "fedit", **LORA}, rounds=1), False)
    assert abs(float(W[0, 1]) - 0.5) > 0.1 and abs(float(W[2, 1]) - 0.5) > 0.1
