"""A federated and a local adapter from one start become one at the client: interpolation, Fisher merging, Potara.

Both branches, the information and the merged model are computed by dense weights, `torch.optim` and loops.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import HEAD, Arrays, assert_near, change, logits, loss, mean, trained

CHECKED = {"interpolation": "by hand", "fisher_merging": "by hand", "potara": "by hand"}


def branches(played: Played) -> tuple[Arrays, dict[str, Arrays]]:
    """FedIT after two rounds, and each client's six steps of one optimiser from the same start."""
    common = start = played.start("shared")
    assert all(torch.equal(value, played.start("personal")[key]) for key, value in start.items())
    for _ in range(2):
        each = [trained(common, lambda own: loss(played.data(c), change(own))) for c in CLIENTS]
        common = mean(each, EXAMPLES)
    return common, {c: trained(start, lambda own: loss(played.data(c), change(own)), steps=6) for c in CLIENTS}


def line(fed: Arrays, local: Arrays, w: float) -> Arrays:
    return {key: w * fed[key] + (1 - w) * local[key] for key in fed}


def test_interpolation_by_a_given_weight() -> None:
    played = Played({"name": "interpolation", **LORA, "w": 0.3})
    common, own = branches(played)
    for client in CLIENTS:
        merged = line(common, own[client], 0.3)
        assert_near(played.kept(client, "merged"), merged)
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(merged)), rtol=1e-3, atol=2e-4)


def test_interpolation_picks_the_most_accurate_weight_on_validation_examples() -> None:
    """Of 0, 1/4, ..., 1; of equally good ones the nearest to one half, and of two such the smaller."""
    played = Played({"name": "interpolation", **LORA, "w": "best", "steps": 4}, lr=0.1)
    fed, picked = of(played.server.arrays, "shared"), []
    for client in CLIENTS:
        local, (pixels, labels) = played.kept(client, "personal"), played.data(client, "val")
        right = {
            w: int((logits(pixels, change(line(fed, local, w))).argmax(1) == labels).sum())
            for w in (0, 0.25, 0.5, 0.75, 1)
        }
        best = min((w for w in right if right[w] == max(right.values())), key=lambda w: (abs(w - 0.5), w))
        assert_near(played.kept(client, "merged"), line(fed, local, best))
        picked.append(best)
    assert set(picked) != {0.5}


@pytest.mark.parametrize("space", ["lora", "dense"])
def test_fisher_merging(space: str) -> None:
    """Matena and Raffel 2022: `(F_f + eps) W_f + (F_l + eps) W_l` over the sum of both weights, entry by entry of A and
    B, or of the whole updates; F the mean square of single examples' gradients, eps delta times its mean. The head,
    which has no information of its own, at `tr(1/(F_l + eps)) / (tr(1/(F_f + eps)) + tr(1/(F_l + eps)))`."""
    delta = 0.01
    played = Played({"name": "fisher_merging", **LORA, "space": space, "damping": {"delta": delta}})
    common, own = branches(played)
    for client in CLIENTS:
        local = own[client]
        F_f, F_l = (information(played.data(client), adapter, space) for adapter in (common, local))
        eps = delta * float(torch.cat([value.flatten() for F in (F_f, F_l) for value in F.values()]).mean())
        a, b = (sum(float((1 / (value + eps)).sum()) for value in F.values()) for F in (F_f, F_l))
        w = b / (a + b)
        head = {key: w * common[key] + (1 - w) * local[key] for key in HEAD}

        def by_entry(key: str, mine: Tensor, other: Tensor) -> Tensor:
            return ((F_f[key] + eps) * mine + (F_l[key] + eps) * other) / (F_f[key] + F_l[key] + 2 * eps)

        if space == "lora":
            merged = {key: by_entry(key, common[key], local[key]) for key in F_f}
            assert_near(played.kept(client, "merged"), {**merged, **head}, rtol=5e-3, atol=2e-4)
            expected = change({**merged, **head})
        else:
            dense = [{key: value for key, value in change(one).items() if key in F_f} for one in (common, local)]
            expected = {key: by_entry(key, *(one[key] for one in dense)) for key in F_f}
            expected |= {key.replace("/", "."): value for key, value in head.items()}
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, expected), rtol=5e-3, atol=2e-3)


def single_gradients(data: tuple[Tensor, Tensor], adapter: Arrays, space: str = "lora") -> Arrays:
    """The gradient of each example, one backward pass for each, of A and B or of the dense update: (examples, ...)."""
    whole = change(adapter)
    leaves = adapter if space == "lora" else {key: whole[key] for key in whole if not key.startswith("classifier")}
    leaves = {key: value.clone().requires_grad_(True) for key, value in leaves.items() if key not in HEAD}
    rows = []
    for pixels, label in zip(data[0].split(1), data[1].split(1), strict=True):
        used = change({**adapter, **leaves}) if space == "lora" else {**whole, **leaves}
        rows.append(torch.autograd.grad(loss((pixels, label), used), list(leaves.values())))
    return {key: torch.stack(each) for key, each in zip(leaves, zip(*rows, strict=True), strict=True)}


def information(data: tuple[Tensor, Tensor], adapter: Arrays, space: str) -> Arrays:
    """Mean over examples of the squared gradient."""
    return {key: value.square().mean(0) for key, value in single_gradients(data, adapter, space).items()}


def test_potara() -> None:
    """Zou et al. 2026, eqs. 13 to 20 and 54 to 58: `v = 1 / (F + eps)`, the covariance `clip(rho sqrt(v_f v_l), 0,
    min(v_f, v_l))` by the correlation of paired gradients, and `w = (b - c) / (a + b - 2c)` of the traces."""
    played = Played({"name": "potara", **LORA, "damping": {"delta": 0.01}})
    common, own = branches(played)
    weights = []
    for client in CLIENTS:
        pair = [single_gradients(played.data(client), adapter) for adapter in (common, own[client])]
        g_f, g_l = (torch.cat([g.flatten(1) for g in one.values()], 1).double() for one in pair)
        F_f, F_l = g_f.square().mean(0), g_l.square().mean(0)
        eps = 0.01 * torch.cat([F_f, F_l]).mean()
        v_f, v_l = 1 / (F_f + eps), 1 / (F_l + eps)
        rho = torch.stack([torch.corrcoef(columns.T)[0, 1] for columns in torch.stack([g_f, g_l], -1).unbind(1)])
        covariance = (rho * (v_f * v_l).sqrt()).clamp_min(0).minimum(torch.minimum(v_f, v_l))
        a, b, c = (float(value.sum()) for value in (v_f, v_l, covariance))
        w = (b - c) / (a + b - 2 * c)
        weights.append(w)
        merged = line(common, own[client], w)
        assert played.memory(client).scalars["w"] == pytest.approx(w, rel=5e-3)
        assert_near(played.kept(client, "merged"), merged, rtol=5e-3, atol=2e-4)
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(merged)), rtol=5e-3, atol=2e-3)
    assert all(0.02 < w < 0.98 and abs(w - 0.5) > 1e-3 for w in weights), weights
