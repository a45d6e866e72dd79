"""Learning the rank scales (Lee et al. 2025, eqs. 1 to 5): cross-entropy with a sparse prior and a hyper-prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED, HIGH, LOW, SCALES, clamp_through
from befit.adapters.keys import factor, join, slot
from befit.core.values import Tick
from befit.protocol.site import Site
from befit.train.loop import TrainingDiverged
from befit.train.optim import learning_rate, make_optimiser

_WEIGHTS = slot(BUDGETED) & factor("A", "B")
_HEADS = slot(SCALES) & ~factor("lambda")
_SCALES = slot(SCALES) & factor("lambda")


@dataclass(frozen=True)
class Prior:
    """`alpha_s / N * L_s + alpha_p / N * L_p`, sums over all ranks of all modules.

    form  "simplified": `L_s = n / lam`, `L_p = log lam + 100 lam`; "exact": the negative logarithms of a Laplace prior
          of scale lam and of a Gamma(0.01, rate 100) prior, in which alpha_s weighs log lam too
    """

    alpha_s: float = 1e2
    alpha_p: float = 1e-2
    form: Literal["simplified", "exact"] = "simplified"

    def sparsity(self, norms: Tensor, scales: Tensor) -> Tensor:
        """L_s from the columns' L1 norms and the clamped scales, both (L, r)."""
        loss = norms / scales
        return (loss if self.form == "simplified" else loss + scales.log() + math.log(2)).sum()

    def spread(self, scales: Tensor) -> Tensor:
        """L_p."""
        if self.form == "simplified":
            return (scales.log() + 100 * scales).sum()
        constant = -0.01 * math.log(100) + math.lgamma(0.01)
        return (0.99 * scales.log() + 100 * scales + constant).sum()

    def __call__(self, norms: Tensor, scales: Tensor, examples: int) -> Tensor:
        penalties = self.alpha_s * self.sparsity(norms, scales) + self.alpha_p * self.spread(scales)
        return penalties / examples


@dataclass(frozen=True)
class ScaleSearch:
    """How a method searches the ranks' scales: its block `search`.

    lr       learning rate of the scales (Adam)
    alpha_s  weight of the prior that ties a scale to its column of B
    alpha_p  weight of the prior that keeps scales small
    prior    "simplified" as in the paper's experiments, or "exact"
    clip     largest gradient norm of A and B; 0 does not clip
    """

    lr: float = 1e-2
    alpha_s: float = 1e2
    alpha_p: float = 1e-2
    prior: Literal["simplified", "exact"] = "simplified"
    clip: float = 1.0

    def make(
        self, *, accumulate: bool = False, return_raw: bool = False, precision: torch.dtype = torch.float32
    ) -> Search:
        """The search with what a preset does otherwise, see `Search`."""
        return Search(
            Prior(self.alpha_s, self.alpha_p, self.prior), self.lr, self.clip, accumulate, return_raw, precision
        )


def stationary_scale(norm: float, prior: Prior) -> float:
    """Where the simplified penalties alone leave a scale: `(-1 + sqrt(1 + 400 n alpha_s / alpha_p)) / 200`, clamped.

    >>> [round(stationary_scale(n, Prior()), 4) for n in (0.0, 1e-4, 0.01, 0.1)]
    [0.0001, 0.0951, 0.995, 3.1573]
    """
    return min(HIGH, max(LOW, (math.sqrt(1 + 400 * norm * prior.alpha_s / prior.alpha_p) - 1) / 200))


def column_norms(B: list[Tensor]) -> Tensor:
    """`n[l, k] = sum_j |B_l[j, k]|`, (L, r): how far column k has come from its start at zero."""
    return torch.stack([columns.abs().sum(0) for columns in B])


@dataclass(frozen=True)
class Search:
    """How scales are learnt.

    lr_lambda   Adam's rate for the scales; everything else has train.lr
    clip        largest gradient norm of A and B; the scales' gradients, far larger at first, are left alone
    accumulate  never clear the scales' gradients, as the released code
    return_raw  return the scales as the optimiser left them, unclamped, as the released code
    precision   dtype of the scales and of all that their optimiser knows; bfloat16 in the released code
    """

    prior: Prior = Prior()
    lr_lambda: float = 1e-2
    clip: float = 1.0
    accumulate: bool = False
    return_raw: bool = False
    precision: torch.dtype = torch.float32


def search(site: Site, at: Tick, how: Search, steps: int, base: tuple[str, ...] = ()) -> Tensor:
    """Train A, B and the scales from what the model holds; returns the scales (L, r), clamped.

    base  slots of the model that is personalised; they are frozen

    The weights that were trained stay in the model, for the caller to throw away. N of the prior is the number of the
    client's training examples. Adds the mean loss to the site's report. Raises TrainingDiverged as `train` does.
    """
    model, budget = site.model, site.budget
    names = list(model.shapes.targets)
    scales = [model.leaves(_SCALES)[join(SCALES, name, "lambda")] for name in names]
    B = [model.leaves(_WEIGHTS)[join(BUDGETED, name, "B")] for name in names]
    everything = _WEIGHTS | _HEADS | _SCALES
    optimiser = make_optimiser(model.parameters(_WEIGHTS | _HEADS), budget)
    own = [scale.detach().to(how.precision, copy=True) for scale in model.parameters(_SCALES)]
    slow = torch.optim.Adam(own, lr=how.lr_lambda, foreach=False)
    examples = len(site.examples("train"))
    carried = [torch.zeros_like(scale) for scale in own]
    total = torch.zeros((), device=model.device)
    with model.training(True):
        for step, batch in enumerate(site.batches("train", steps, at)):
            with model.active(*base, SCALES), model.trainable(everything):
                task = site.loss(batch)
                penalty = how.prior(column_norms(B), clamp_through(torch.stack(scales), LOW, HIGH), examples)
                model.zero_gradients()
                (task + penalty).backward()
            if how.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(_WEIGHTS | _HEADS), how.clip)
            for before, mine, parameter in zip(carried, own, model.parameters(_SCALES), strict=True):
                assert parameter.grad is not None
                before.copy_(parameter.grad + before if how.accumulate else parameter.grad)
                mine.grad = before
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(budget, step, at)
            optimiser.step()
            slow.step()
            with torch.no_grad():
                for mine, parameter in zip(own, model.parameters(_SCALES), strict=True):
                    parameter.copy_(mine)
            total += task.detach()
    loss = float(total) / max(1, steps)
    if not math.isfinite(loss):
        raise TrainingDiverged(
            f"the loss of the search for ranks became {loss} within {steps} steps at learning rate "
            f"{budget.lr} and lr_lambda {how.lr_lambda}"
        )
    site.report.update({"steps": float(steps), "loss": loss})
    learnt = torch.stack([scale.detach().cpu().clone() for scale in scales])
    return learnt if how.return_raw else learnt.clamp(LOW, HIGH)
