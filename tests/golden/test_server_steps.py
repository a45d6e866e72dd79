"""What a server does with the mean of the clients' adapters: FedAvgM, FedAdagrad, FedAdam, FedYogi, SCAFFOLD.

With `D_t = mean_k theta_k - theta_t`, the server steps along D_t (Reddi et al. 2021, Algorithm 2). FedAvgM (Hsu et al.
2019) and FedAdagrad are `torch.optim.SGD` and `torch.optim.Adagrad` with `-D_t` as the gradient; Adam and
Yogi are written out, since PyTorch's Adam corrects its averages for their start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played
from tests.golden.reference import RATE, STEPS, Arrays, Learner, assert_near, change, logits, loss, mean, sgd, trained

CHECKED = {
    "fedavgm": "torch.optim",
    "fedadagrad": "torch.optim",
    "fedadam": "by hand",
    "fedyogi": "by hand",
    "scaffold": "by hand",
}
TAU, BETA1, BETA2 = 1e-3, 0.9, 0.99


class ByTorch:
    """A server that steps along -D by an optimiser of `torch.optim`."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make, self.learner = make, None

    def __call__(self, theta: Arrays, merged: Arrays) -> Arrays:
        self.learner = self.learner or Learner(theta, self.make)
        for key, leaf in self.learner.arrays.items():
            leaf.grad = theta[key] - merged[key]
        self.learner.optimiser.step()
        return self.learner.now


class ByHand:
    """`m = 0.9 m + 0.1 D`, Adam's `u = 0.99 u + 0.01 D^2` or Yogi's `u = u - 0.01 D^2 sign(u - D^2)`, from tau^2;
    `theta + lr m / (sqrt(u) + tau)` (Reddi et al. 2021, Algorithm 2)."""

    def __init__(self, yogi: bool, lr: float) -> None:
        self.yogi, self.lr, self.m, self.u = yogi, lr, dict[str, Tensor](), dict[str, Tensor]()

    def __call__(self, theta: Arrays, merged: Arrays) -> Arrays:
        after = {}
        for key, value in theta.items():
            D = merged[key] - value
            m = BETA1 * self.m.get(key, torch.zeros_like(D)) + (1 - BETA1) * D
            u = self.u.get(key, torch.full_like(D, TAU**2))
            u = u - (1 - BETA2) * D**2 * torch.sign(u - D**2) if self.yogi else BETA2 * u + (1 - BETA2) * D**2
            self.m[key], self.u[key] = m, u
            after[key] = value + self.lr * m / (u.sqrt() + TAU)
        return after


SERVERS: dict[str, tuple[dict[str, Any], Callable[[], Any], list[float]]] = {
    "fedavgm": ({"server_lr": 0.7}, lambda: ByTorch(lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)), EXAMPLES),
    "fedadagrad": (
        {"server_lr": 0.02},
        lambda: ByTorch(lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=TAU**2, eps=TAU)),
        [1.0, 1.0, 1.0],
    ),
    "fedadam": ({"server_lr": 0.02}, lambda: ByHand(False, 0.02), [1.0, 1.0, 1.0]),
    "fedyogi": ({"server_lr": 0.02}, lambda: ByHand(True, 0.02), [1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("name", SERVERS)
def test_server_optimisers(name: str) -> None:
    """Three rounds, so that averages of averages count; clients learn by SGD from what the server's step gives."""
    options, make, shares = SERVERS[name]
    played = Played({"name": name, **LORA, **options}, rounds=3, optimiser="sgd")
    step, theta = make(), played.start("shared")
    for round_ in (1, 2, 3):
        each = [trained(theta, lambda own: loss(played.data(c), change(own)), sgd) for c in CLIENTS]
        for client, expected in zip(CLIENTS, each, strict=True):
            assert_near(played.sent(round_, client), expected, atol=5e-5)
        theta = step(theta, mean(each, shares))
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(theta)), rtol=2e-3, atol=1e-3)


def test_scaffold() -> None:
    """Karimireddy et al. 2020, Algorithm 1, option II: `y -= eta (g - c_k + c)`,
    `c_k' = c_k - c + (x - y) / (n eta)`, `x += eta_g mean (y - x)`, `c += sum (c_k' - c_k) / K`."""
    played = Played({"name": "scaffold", **LORA, "server_lr": 0.8}, rounds=3, optimiser="sgd")
    x = played.start("shared")
    c = {key: torch.zeros_like(value) for key, value in x.items()}
    controls = dict.fromkeys(CLIENTS, c)
    for round_ in (1, 2, 3):
        each, changes = [], []
        for client in CLIENTS:
            own, y = controls[client], Learner(x, sgd)
            for _ in range(STEPS):
                tilt = sum(((c[key] - own[key]) * leaf).sum() for key, leaf in y.arrays.items())
                y.step(loss(played.data(client), change(y.arrays)) + tilt)
            each.append(y.now)
            controls[client] = {key: own[key] - c[key] + (x[key] - y.now[key]) / (STEPS * RATE) for key in x}
            changes.append({key: controls[client][key] - own[key] for key in x})
            assert_near(played.sent(round_, client), each[-1])
            moved = {key: c[key] + value for key, value in changes[-1].items()}  # what is sent of c_k' - c_k
            assert_near(played.sent(round_, client, "control"), moved, atol=1e-4)
        average = mean(each)
        x = {key: value + 0.8 * (average[key] - value) for key, value in x.items()}
        c = {key: value + mean(changes)[key] for key, value in c.items()}
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(x)), rtol=1e-3, atol=2e-4)
