"""An audit of the noise by one run (Steinke et al. 2023, Algorithm 1 with the bound of their appendix D).

Half of the canaries, by a coin for each, are in the training data. Each has a direction of its own in the factor A of a
real adapter, which the attacker looks at: it guesses who was in for those that moved most along their gradient, and
who was not for those that moved least. The number of right guesses bounds epsilon from below, with 95 % confidence.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from befit.adapters.keys import factor, slot
from befit.adapters.layout import lora
from befit.adapters.model import AdaptedModel
from befit.core.chance import Chance
from befit.core.values import ClientInfo, Tick
from befit.protocol.accountant import Release, noise_for
from befit.protocol.mechanism import Mechanism
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Gradients
from befit.tasks.examples import StackedExamples
from befit.tasks.image_classification import ImageClassification
from befit.tasks.images import ImagePreprocessor
from befit.train.loop import train
from befit.train.passes import Pass

pytest.importorskip("dp_accounting")
CANARIES, GUESSES, STEPS, DELTA, CLIP = 2000, 400, 4, 1e-5, 0.1
A = slot("shared") & factor("A")


class Logistic(nn.Module):
    """Two classes from one number for each canary."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.score = nn.Linear(inputs, 2, bias=False)
        nn.init.zeros_(self.score.weight)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.score(pixel_values))


def moved(noise: float, key: bytes, rate: float) -> tuple[Tensor, Tensor]:
    """Who was in, and how far training moved the adapter along each canary's gradient."""
    draw = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    member = torch.rand(CANARIES, generator=draw) < 0.5
    labels = torch.randint(2, (CANARIES,), generator=draw)
    inside = member.nonzero().flatten()
    data = StackedExamples({"pixel_values": torch.eye(CANARIES)[inside], "labels": labels[inside]})
    model = AdaptedModel(Logistic(CANARIES), ("score",), head=False)
    model.install(lora(1, 1.0), seed=0)
    model.load({"shared/score/A": torch.zeros(1, CANARIES), "shared/score/B": torch.tensor([[1.0], [-1.0]])})
    task, budget = (
        ImageClassification(ImagePreprocessor(1, 4, 4), ("zero", "one")),
        TrainSettings(max_steps=STEPS, batch_size=500, lr=1.0, optimiser="sgd"),
    )
    mechanism = Mechanism(noise, CLIP, rate, Chance(key), lambda split: data, Gradients(), left=STEPS)
    site = Site(ClientInfo("a", "toy", len(data)), model, task, budget, lambda split: data, mechanism=mechanism)
    train(site, [Pass(A, ("shared",))], Tick("federate", 1, 1, 0))
    change = model.dump(A)["shared/score/A"][0]
    return member, change * torch.where(labels == 0, 1.0, -1.0)


def least_epsilon(member: Tensor, score: Tensor) -> float:
    """The largest epsilon that the right ones of the guesses refute, at 95 %."""
    order = score.argsort(descending=True)
    right = int(member[order[: GUESSES // 2]].sum() + (~member[order[-(GUESSES // 2) :]]).sum())
    low, high = 0.0, 20.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if chance_of(right, middle) < 0.05 else (low, middle)
    return low


def chance_of(right: int, budget: float) -> float:
    """Of at least so many right guesses under (budget, DELTA)-privacy, at most."""
    from scipy.stats import binom

    likely = 1 / (1 + math.exp(-budget))
    tail, total, worst = float(binom.sf(right - 1, GUESSES, likely)), 0.0, 0.0
    for fewer in range(1, right + 1):
        total += float(binom.pmf(right - fewer, GUESSES, likely))
        worst = max(worst, total / fewer)
        if total > 1 - 1e-12:
            break
    return min(1.0, tail + 2 * CANARIES * DELTA * worst)


@pytest.mark.parametrize(("rate", "target", "least"), [(1.0, 4.0, 1.0), (0.25, 1.0, 0.0)])
def test_an_audit_finds_no_more_than_epsilon_allows_and_much_without_noise(
    rate: float, target: float, least: float
) -> None:
    """More is found also where the noise is a quarter of what is counted. Of batches that are drawn the attacker sees
    less, for a canary that was in none of them says nothing."""
    noise = noise_for((Release(rate, 1.0, STEPS),), target, DELTA)
    assert least <= least_epsilon(*moved(noise, b"k", rate)) < target
    assert least_epsilon(*moved(0.0, b"k", rate)) > target
    assert least_epsilon(*moved(noise / 4, b"k", rate)) > target
