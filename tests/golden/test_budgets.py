"""Which ranks, and which learning rates: AdaLoRA, BayesTune-LoRA, FedP2EFT, FedL2P.

AdaLoRA against PEFT's own; the others by dense weights, `torch.optim` and loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.methods.parts.budget.meta import in_two
from tests.golden.play import CLIENTS, EXAMPLES, Played
from tests.golden.reference import (
    MODEL,
    MODULES,
    RATE,
    STEPS,
    Arrays,
    Learner,
    adamw,
    assert_near,
    change,
    logits,
    loss,
    mean,
)
from tests.tiny import tiny_model

CHECKED = {"adalora": "PEFT", "bayestune": "by hand", "fedp2eft": "by hand", "fedl2p": "by hand"}
LOW, HIGH = 1e-4, 1e3


def clamped(values: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    """Clamped forward, and gradients as if it were not (straight through)."""
    return values + (values.clamp(low, high) - values).detach()


# AdaLoRA


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("orthogonal", "interval"), [(0.1, 1), (0.0, 3)])
def test_adalora(orthogonal: float, interval: int) -> None:
    """Zhang et al. 2023: fourteen steps in two rounds, as PEFT's AdaLoraModel takes them from there, its head too."""
    rounds, steps = 2, 7
    block = {"name": "adalora", "rank": 2, "orthogonal": orthogonal, "interval": interval}
    played = Played(block, rounds=rounds, max_steps=steps)
    for client in CLIENTS:
        theirs = in_peft(played.start("budgeted"), orthogonal, interval, rounds * steps)
        pixels, labels = played.data(client)
        optimiser = adamw([p for p in theirs.parameters() if p.requires_grad])
        for step in range(rounds * steps):
            theirs(pixel_values=pixels, labels=labels).loss.backward()
            optimiser.step()
            theirs.update_and_allocate(step)
            optimiser.zero_grad()
        ranks = 0
        kept = played.kept(client, "budgeted")
        for name, path in MODULES.items():
            layer = theirs.model.get_submodule(path)
            scales = layer.lora_E["default"].detach().flatten()
            chosen = scales.nonzero().flatten()
            ranks += len(chosen)
            torch.testing.assert_close(kept[f"{name}/lambda"], scales, rtol=1e-3, atol=1e-4)
            if len(chosen):  # only those are kept
                A, B = layer.lora_A["default"].detach()[chosen], layer.lora_B["default"].detach()[:, chosen]
                assert_near({key: kept[f"{name}/{key}"] for key in "AB"}, {"A": A, "B": B}, atol=1e-4)
        assert ranks == 2 * len(MODULES)
        test, _ = played.data(client, "test")
        with torch.no_grad():
            torch.testing.assert_close(played.answers(client), theirs(pixel_values=test).logits, rtol=1e-3, atol=1e-3)


def in_peft(start: Arrays, orthogonal: float, interval: int, steps: int) -> Any:
    config = peft.AdaLoraConfig(
        target_modules=list(MODULES.values()),
        target_r=2,
        init_r=3,
        lora_alpha=8,
        total_step=steps,
        tinit=int(0.1 * steps),
        tfinal=int(0.3 * steps),
        deltaT=interval,
        orth_reg_weight=orthogonal,
        lora_dropout=0.0,
    )
    model = peft.tuners.adalora.AdaLoraModel(tiny_model("vit"), config, "default")
    model.model.classifier.requires_grad_(True)
    with torch.no_grad():
        for name, path in MODULES.items():
            layer = model.model.get_submodule(path)
            layer.lora_A["default"].copy_(start[f"{name}/A"])
            layer.lora_B["default"].copy_(start[f"{name}/B"])
            layer.ranknum["default"] -= 1e-5  # which PEFT adds to the rank that it divides alpha by
    return model


# rank scales


def scaled(adapter: Arrays, scales: Tensor) -> Arrays:
    """`W x + s B (lambda * A x)` for scales (L, r)."""
    rows = dict(zip(MODULES, scales, strict=True))
    return change({key: value * rows[key[:-2]] if key.endswith("/B") else value for key, value in adapter.items()})


def searched(data: tuple[Tensor, Tensor], start: Arrays, scales: Tensor, alpha_s: float, alpha_p: float) -> Tensor:
    """The scales after a round's search (Lee et al. 2025a, eqs. 1 to 5): cross-entropy and
    `alpha_s / N sum |B[:, k]|_1 / lambda_k + alpha_p / N sum (log lambda_k + 100 lambda_k)`, lambda in [1e-4, 1000];
    AdamW for A, B and the head, whose gradients are cut to norm 1, and Adam at 0.01 for the scales."""
    weights, slow = Learner(start), torch.optim.Adam([scales := scales.clone().requires_grad_(True)], lr=1e-2)
    for _ in range(STEPS):
        used = clamped(scales)
        norms = torch.stack([weights.arrays[f"{name}/B"].abs().sum(0) for name in MODULES])
        prior = alpha_s * (norms / used).sum() + alpha_p * (used.log() + 100 * used).sum()
        slow.zero_grad()
        weights.optimiser.zero_grad()
        (loss(data, scaled(weights.arrays, used)) + prior / len(data[1])).backward()
        nn.utils.clip_grad_norm_(list(weights.arrays.values()), 1.0)
        weights.optimiser.step()
        slow.step()
    return scales.detach().clamp(LOW, HIGH)


def pruned(scales: Tensor, rank: int) -> Tensor:
    """The rank x L largest scales of the whole model, and zeros."""
    threshold = scales.flatten().sort(descending=True).values[rank * len(scales) - 1]
    assert int((scales >= threshold).sum()) == rank * len(scales), "no ties, or the choice is nobody's"
    return scales * (scales >= threshold)


def fine_tuned(data: tuple[Tensor, Tensor], start: Arrays, scales: Tensor, rounds: int) -> Arrays:
    """What the adapter with frozen scales changes after its training, from a fresh A and B."""
    learner = Learner(start)
    for _ in range(rounds * STEPS):
        learner.step(loss(data, scaled(learner.arrays, scales)))
    return scaled(learner.now, scales)


def test_bayestune() -> None:
    """Lee et al. 2025a: search alone, keep two ranks per module on average of four, and train those afresh (eqs. 1 to
    5)."""
    played = Played({"name": "bayestune", "rank": 2, "rank_max": 2, "rounds_search": 1, "search": {"alpha_s": 0.02}})
    start = {key: value for key, value in played.start("budgeted").items() if not key.endswith("lambda")}
    first = torch.stack([played.start("search")[f"{name}/lambda"] for name in MODULES])
    for client in CLIENTS:
        data = played.data(client)
        scales = searched(data, start, first, 0.02, 1e-2)
        torch.testing.assert_close(played.kept(client, "scales")["all/lambda"], scales, rtol=1e-3, atol=1e-5)
        expected = fine_tuned(data, start, pruned(scales, 2), 2)
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, expected), rtol=1e-3, atol=5e-4)


def features(pixels: Tensor) -> Tensor:
    """Mean and `sqrt(variance + 1e-5)` of the input of each linear layer of the bare model, over all that is in it."""
    rows: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows.extend([inputs[0].mean(), (inputs[0].var() + 1e-5).sqrt()])

    handles = [one.register_forward_pre_hook(see) for one in MODEL.modules() if isinstance(one, nn.Linear)]
    MODEL(pixel_values=pixels)
    for handle in handles:
        handle.remove()
    return torch.stack(rows)


def comparable(net: Arrays, seen: Tensor) -> Arrays:
    """Without the weights of inputs that are rounding, as the mean after a layer norm is: Adam follows its sign."""
    return {**net, "first/W": net["first/W"] * (seen.abs() > 1e-6)}


def generated(net: Arrays, seen: Tensor) -> Tensor:
    """`clamp(W2 prelu(W1 f + b1) + b2)` (Lee et al. 2025a, Figure 1)."""
    hidden = net["first/W"] @ seen + net["first/b"]
    hidden = torch.where(hidden > 0, hidden, net["activation/slope"] * hidden)
    return clamped(net["second/W"] @ hidden + net["second/b"])


def test_fedp2eft() -> None:
    """Lee et al. 2025a, Figure 2: scales from the generator, a search from there, ten steps of Adam on the L1 distance
    to what it found; the mean of generators by examples. At the end the generator's scales are pruned and used."""
    block = {"name": "fedp2eft", "rank": 2, "rank_max": 2, "search": {"alpha_s": 0.02}, "generator": {"lr": 1e-2}}
    played = Played(block)
    net = played.start("generator")
    start = {key: value for key, value in played.start("budgeted").items() if not key.endswith("lambda")}
    seen = {client: features(played.data(client)[0]) for client in CLIENTS}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            first = generated(net, seen[client]).view(len(MODULES), -1)
            target = searched(played.data(client), start, first, 0.02, 1e-2).flatten()
            learner = Learner(net, lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
            for _ in range(10):
                learner.step((generated(learner.arrays, seen[client]) - target).abs().sum())
            each.append(learner.now)
            sent = played.sent(round_, client, "generator", "generate")
            assert_near(*(comparable(state, seen[client]) for state in (sent, each[-1])), atol=1e-4)
        net = mean(each, EXAMPLES)
    for client in CLIENTS:
        scales = generated(net, seen[client]).view(len(MODULES), -1)
        torch.testing.assert_close(
            played.kept(client, "scales")["all/lambda"].view_as(scales), scales, rtol=1e-3, atol=1e-4
        )
        expected = fine_tuned(played.data(client), start, pruned(scales, 2), 2)
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, expected), rtol=1e-3, atol=1e-3)


# FedL2P


def predicted(net: Arrays, seen: Tensor) -> Tensor:
    """`clamp(W3 relu(W2 relu(W1 f + b1) + b2) + b3; 0, 1000) eta` (Lee et al. 2023), one for each tensor."""
    hidden = seen
    for name in ("first", "second", "third"):
        hidden = net[f"{name}/W"] @ hidden + net[f"{name}/b"]
        hidden = hidden if name == "third" else F.relu(hidden)
    return clamped(hidden, 0.0, HIGH) * net["eta/value"]


class AtRates:
    """Adam (Kingma and Ba 2015, Algorithm 1) with a rate for every tensor; it last went against `directions`."""

    def __init__(self, start: Arrays) -> None:
        self.arrays = {key: value.clone().requires_grad_(True) for key, value in start.items()}
        self.m = {key: torch.zeros_like(value) for key, value in start.items()}
        self.v, self.steps, self.directions = dict(self.m), 0, dict(self.m)

    def step(self, objective: Tensor, rates: Tensor) -> None:
        self.steps += 1
        gradients = torch.autograd.grad(objective, list(self.arrays.values()))
        for (key, leaf), g, rate in zip(self.arrays.items(), gradients, rates, strict=True):
            self.m[key] = 0.9 * self.m[key] + 0.1 * g
            self.v[key] = 0.999 * self.v[key] + 0.001 * g * g
            m, v = self.m[key] / (1 - 0.9**self.steps), self.v[key] / (1 - 0.999**self.steps)
            self.directions[key] = m / (v.sqrt() + 1e-8)
            with torch.no_grad():
                leaf -= rate * self.directions[key]


def hypergradient(learner: AtRates, train: Callable[[Arrays], Tensor], val: Callable[[Arrays], Tensor]) -> Tensor:
    """`-<(H p)_o, u_o>` for each tensor o, `p = sum_{j <= 3} (I - 0.1 H)^j grad L_V`, H of L_T in full (Lorraine et al.
    2020, Algorithm 3)."""
    keys = list(learner.arrays)
    sizes = [learner.arrays[key].numel() for key in keys]
    flat = torch.cat([learner.arrays[key].detach().flatten() for key in keys])

    def of(objective: Callable[[Arrays], Tensor]) -> Callable[[Tensor], Tensor]:
        def function(vector: Tensor) -> Tensor:
            parts = zip(keys, vector.split(sizes), strict=True)
            return objective({key: part.view_as(learner.arrays[key]) for key, part in parts})

        return function

    H = torch.autograd.functional.hessian(of(train), flat, vectorize=True)
    outer = torch.autograd.functional.jacobian(of(val), flat)
    p = term = outer
    for _ in range(3):
        term = term - 0.1 * H @ term
        p = p + term
    curved = (H @ p).split(sizes)
    return torch.stack([-(h * learner.directions[key].flatten()).sum() for h, key in zip(curved, keys, strict=True)])


def test_fedl2p() -> None:
    """Lee et al. 2023, hypergradient by the implicit function theorem, with two records a client, one to learn from and
    one to judge by, so that nothing is drawn: train at the network's rates, then a step of Adam on its hypergradient,
    whose entries are cut to [-1, 1]; twice a round. At the end the network with the lowest mean validation loss gives
    the rates of an ordinary training."""
    played = Played({"name": "fedl2p", "rank": 2, "outer": 2, "draws": 1, "validation": 0.5, "lr_net": 3e-3}, rows=2)
    net, start = played.start("rates"), played.start("budgeted")
    parts = {}
    for client in CLIENTS:
        pixels, labels = played.data(client)
        halves = in_two(played.fresh(client), 0.5, 0)  # which record is which is drawn
        places = {name: halves.examples(name).places for name in ("train", "val")}  # type: ignore[attr-defined]
        parts[client] = {name: (pixels[rows], labels[rows]) for name, rows in places.items()}
    seen = {client: features(parts[client]["train"][0]) for client in CLIENTS}
    lowest, best = torch.inf, net
    for round_ in (1, 2):
        each, losses = [], []
        for client in CLIENTS:
            train, val = ((lambda own, name=name: loss(parts[client][name], change(own))) for name in ("train", "val"))
            theta = {key: value.clone().requires_grad_(True) for key, value in net.items()}
            weights = [value for key, value in theta.items() if key != "eta/value"]
            meta = torch.optim.Adam([{"params": weights, "lr": 3e-3}, {"params": [theta["eta/value"]], "lr": 1e-2}])
            judged = []
            for _ in range(2):
                learner, rates = AtRates(start), RATE * predicted(theta, seen[client])
                for _ in range(STEPS):
                    learner.step(train(learner.arrays), rates.detach())
                judged.append(float(val(learner.arrays).detach()))
                meta.zero_grad()
                rates.backward(hypergradient(learner, train, val))
                theta["eta/value"].grad /= RATE  # type: ignore[operator]  # eta is in units of the common rate
                for value in theta.values():
                    assert value.grad is not None
                    value.grad.clamp_(-1, 1)
                meta.step()
            each.append({key: value.detach() for key, value in theta.items()})
            losses.append(sum(judged) / 2)
            assert_near(
                *(comparable(one, seen[client]) for one in (played.sent(round_, client, "rates", "meta"), each[-1]))
            )
            found = played.sent(round_, client, "validation", "meta")["all/loss"]
            torch.testing.assert_close(found, torch.tensor([losses[-1]]), rtol=1e-3, atol=1e-4)
        net = mean(each)
        if sum(losses) < lowest:
            lowest, best = sum(losses), net
    for client in CLIENTS:
        rates = RATE * predicted(best, seen[client])
        learner = AtRates(start)
        for _ in range(2 * STEPS):
            learner.step(loss(parts[client]["train"], change(learner.arrays)), rates)
        assert_near(played.kept(client, "budgeted"), {k: v.detach() for k, v in learner.arrays.items()}, atol=2e-4)
