"""Learning the rank scales (Lee et al. 2025a, eqs. 1 to 5): cross-entropy with a sparse prior and a hyper-prior."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED, HIGH, LOW, SCALES, clamp_through
from befit.adapters.keys import factor, join, slot
from befit.core.errors import TrainingDiverged
from befit.core.values import Tick
from befit.protocol.jobs import Steps
from befit.protocol.site import Site
from befit.train.loop import training
from befit.train.passes import Pass, Stateful
from befit.train.terms import Guide, Laned

if TYPE_CHECKING:
    from befit.tasks.base import Batch

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
        """L_s from the columns' L1 norms and the clamped scales, both (L, r); of each lane, (lanes, L, r)."""
        loss = norms / scales
        return (loss if self.form == "simplified" else loss + scales.log() + math.log(2)).sum((-2, -1))

    def spread(self, scales: Tensor) -> Tensor:
        """L_p."""
        if self.form == "simplified":
            return (scales.log() + 100 * scales).sum((-2, -1))
        constant = -0.01 * math.log(100) + math.lgamma(0.01)
        return (0.99 * scales.log() + 100 * scales + constant).sum((-2, -1))

    def __call__(self, norms: Tensor, scales: Tensor, examples: int | Tensor) -> Tensor:
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


def column_norms(B: list[Tensor]) -> Tensor:
    """`n[l, k] = sum_j |B_l[j, k]|`, (L, r) or (lanes, L, r): how far column k has come from its start at zero."""
    return torch.stack([columns.abs().sum(-2) for columns in B], -2)


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


def searching(site: Site, at: Tick, how: Search, steps: int, base: tuple[str, ...] = ()) -> Steps[Tensor]:
    """Train A, B and the scales from what the model holds, asked for as `training` is; returns the scales (L, r),
    clamped.

    base  slots of the model that is personalised; they are frozen

    The weights that were trained stay in the model, for the caller to throw away. N of the prior is the number of the
    client's training examples. Adds the mean loss to the site's report. Raises TrainingDiverged as `train` does.
    """
    names = [join(SCALES, name, "lambda") for name in site.model.shapes.targets]
    step = Pass(
        _WEIGHTS | _HEADS,
        (*base, SCALES),
        (Penalty(how.prior, (len(site.examples("train")),)),),
        beside=_SCALES,
        after=_Scales(site.model.leaves(_SCALES), how),
    )
    clipped = replace(site, budget=replace(site.budget, grad_clip=how.clip))
    try:
        report = yield from training(clipped, [step], at, steps=steps)
    except TrainingDiverged as error:
        raise TrainingDiverged(
            f"in the search for ranks, with lr_lambda {how.lr_lambda} for their scales, {error}"
        ) from error
    site.report.update(report.numbers())
    learnt = torch.stack([site.model.leaves(_SCALES)[name].detach().cpu().clone() for name in names])
    return learnt if how.return_raw else learnt.clamp(LOW, HIGH)


@dataclass(frozen=True)
class Penalty(Laned):
    """The prior of the scales that are learnt.

    examples  N, of each client that is trained with this one
    """

    prior: Prior
    examples: tuple[int, ...]

    @property
    def alike(self) -> Hashable:
        return type(self), self.prior

    def joined(self, others: Sequence[Penalty]) -> Penalty:
        return replace(self, examples=(*self.examples, *(count for other in others for count in other.examples)))

    def bind(self, site: Site) -> Guide:
        model = site.model
        names = list(model.shapes.targets)
        scales = [model.leaves(_SCALES)[join(SCALES, name, "lambda")] for name in names]
        B = [model.leaves(_WEIGHTS)[join(BUDGETED, name, "B")] for name in names]
        lanes = model.lane_count is not None
        examples = torch.tensor(self.examples, device=model.device) if lanes else self.examples[0]

        def penalty(batch: Batch, logits: Tensor) -> Tensor:
            used = clamp_through(torch.stack(scales, -2), LOW, HIGH)  # (L, r), or (lanes, L, r)
            return self.prior(column_norms(B), used, examples)

        return penalty


class _Scales(Stateful):
    """The scales' own optimiser: they are in `precision`, and so is all that it knows."""

    def __init__(self, leaves: Mapping[str, Tensor], how: Search) -> None:
        self._own = _flat(leaf.detach() for leaf in leaves.values()).to(how.precision, copy=True)
        self._own.grad = torch.zeros_like(self._own)
        self._optimiser = torch.optim.Adam([self._own], lr=how.lr_lambda, foreach=False)
        self._accumulate = how.accumulate

    @torch.no_grad()
    def __call__(self, step: int, leaves: Mapping[str, Tensor]) -> None:
        scales = [leaf for key, leaf in leaves.items() if _SCALES(key)]
        grad, before = _flat(leaf.grad for leaf in scales if leaf.grad is not None), self._own.grad
        assert before is not None
        before.copy_(grad + before if self._accumulate else grad)
        self._optimiser.step()
        for leaf, value in zip(scales, self._own.split([leaf.numel() for leaf in scales]), strict=True):
            leaf.copy_(value)


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])
