"""AdaLoRA's allocation of ranks in the course of training (Zhang et al. 2023, sections 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.keys import join, slot
from befit.core.values import Payload, State
from befit.merge.trim import share_of
from befit.methods.parts.budget.budget import order
from befit.train.passes import Stateful
from befit.train.terms import Guide, Laned

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site
    from befit.tasks.base import Batch

ALLOCATION = "allocation"  # the part of a client's memory that an allocator goes on from
_KEPT = "choice/all/kept"
_AVERAGES = ("sensitivity", "uncertainty")


@dataclass(frozen=True)
class Timetable:
    """How many ranks are left after which step (eq. 12): all, then a cubic descent, then the target for good.

    start, target  ranks of the whole model at first and at the end
    warmup, end    the last step before the descent, and the step that makes the final choice; steps count from 0
    interval       steps between two allocations
    """

    start: int
    target: int
    warmup: int
    end: int
    interval: int = 1

    @classmethod
    def over(cls, steps: int, start: int, target: int, warmup: float, final: float, interval: int = 1) -> Timetable:
        """Shares of `steps`, rounded down; the choice is final before the last step, however few there are."""
        end = min(steps - share_of(final, steps), steps - 1)
        return cls(start, target, min(share_of(warmup, steps), end), end, interval)

    def ranks(self, step: int) -> int:
        """
        >>> table = Timetable(24, 16, warmup=1, end=5)
        >>> [table.ranks(step) for step in range(7)]
        [24, 24, 19, 17, 16, 16, 16]
        """
        if step >= self.end:
            return self.target
        if step <= self.warmup:
            return self.start
        left = 1 - (step - self.warmup) / (self.end - self.warmup)
        return int((self.start - self.target) * left**3 + self.target)

    def allocates(self, step: int) -> bool:
        return step >= self.end or (step > self.warmup and step % self.interval == 0)


class Allocator(Stateful):
    """Follows the gradients of one slot's A, B and lambda, and sets lambda to zero where the budget does not reach.

    Sensitivity I = |theta * grad| of every entry is smoothed, I' = beta1 I' + (1 - beta1) I, and so is how much it
    varies, U' = beta2 U' + (1 - beta2) |I - I'|; an entry's score is I' U' (eqs. 9 to 11). A rank's score is that of
    its lambda and the means over its row of A and its column of B (eq. 7). The ranks with the largest scores of the
    whole model stay; of equal ones the earlier, so that a budget is met exactly.

    memory  the client's, in which an earlier round may have left what `dump` gave
    """

    def __init__(
        self,
        model: AdaptedModel,
        name: str,
        table: Timetable,
        betas: tuple[float, float] = (0.85, 0.85),
        first_step: int = 0,
        memory: Payload | None = None,
    ) -> None:
        leaves = {key.partition("/")[2]: leaf for key, leaf in model.leaves(slot(name)).items()}
        self._modules = list(model.shapes.targets)
        self._table, self._betas, self._first = table, betas, first_step
        stored = {} if memory is None else memory.part(ALLOCATION).arrays
        self._averages = {
            kind: {
                f"{module}/{part}": _start(stored.get(join(kind, module, part)), leaves[f"{module}/{part}"])
                for module in self._modules
                for part in ("A", "B", "lambda")
            }
            for kind in _AVERAGES
        }
        self._kept = stored[_KEPT].to(model.device).bool() if _KEPT in stored else None
        self._many = int(stored[_KEPT].sum()) if _KEPT in stored else 0  # ranks that are kept

    @torch.no_grad()
    def __call__(self, step: int, leaves: Mapping[str, Tensor]) -> None:
        """To be called after every step of the optimiser, with what is trained, while its gradients are still there."""
        leaves = {key.partition("/")[2]: leaf for key, leaf in leaves.items()}
        step += self._first
        if step < self._table.end or self._table.end == 0 == step:
            self._follow(leaves)
        if not self._table.allocates(step):
            return
        # A client that was away when the last choice was made makes it in the first step after it is back.
        if self._kept is None or step <= self._table.end or self._many > self._table.target:
            self._many = self._table.ranks(step)
            self._kept = self._choose(self._many)
        for module, kept in zip(self._modules, self._kept, strict=True):
            leaves[f"{module}/lambda"].mul_(kept)

    def _follow(self, leaves: Mapping[str, Tensor]) -> None:
        beta1, beta2 = self._betas
        for key, smooth in self._averages["sensitivity"].items():
            leaf = leaves[key]
            assert leaf.grad is not None
            now = (leaf * leaf.grad).abs()
            smooth.mul_(beta1).add_(now, alpha=1 - beta1)
            self._averages["uncertainty"][key].mul_(beta2).add_((now - smooth).abs(), alpha=1 - beta2)

    def _choose(self, count: int) -> Tensor:
        """(L, rank) bool: the `count` ranks with the largest scores."""
        return _largest(_scores(self._averages, self._modules), count)

    def dump(self) -> Payload:
        """Averages and the last choice, as a part of a client's memory until the next round."""
        state = {
            f"{kind}/{key}": value.cpu().clone()
            for kind, averages in self._averages.items()
            for key, value in averages.items()
        }
        choice = {} if self._kept is None else {_KEPT: self._kept.float().cpu()}
        return Payload().with_part(ALLOCATION, Payload({**state, **choice}))


def within_budget(adapter: State, memory: Payload, name: str, modules: Sequence[str], count: int) -> State:
    """An adapter of one slot whose timetable has not ended, with all but `count` ranks of the whole model at zero: of
    those that the last choice left, the ones with the largest scores.

    memory  the client's, with what `Allocator.dump` gave
    """
    stored = memory.part(ALLOCATION).arrays
    averages = {
        kind: {key.removeprefix(f"{kind}/"): value for key, value in stored.items() if key.startswith(f"{kind}/")}
        for kind in _AVERAGES
    }
    scores = _scores(averages, modules)
    if _KEPT in stored:
        scores = scores.where(stored[_KEPT].bool(), -1.0)  # below every score of a rank that is there
    kept = _largest(scores, count)
    scales = {join(name, module, "lambda"): row for module, row in zip(modules, kept, strict=True)}
    return {key: value * scales[key] if key in scales else value for key, value in adapter.items()}


def _scores(averages: Mapping[str, Mapping[str, Tensor]], modules: Sequence[str]) -> Tensor:
    """(L, rank): every rank's score, of entries smoothed by `Allocator`."""

    def score(key: str) -> Tensor:
        return averages["sensitivity"][key] * averages["uncertainty"][key]

    return torch.stack(
        [score(f"{module}/lambda") + score(f"{module}/A").mean(1) + score(f"{module}/B").mean(0) for module in modules]
    )


def _largest(scores: Tensor, count: int) -> Tensor:
    """(L, rank) bool: the `count` largest scores; of equal ones the earlier."""
    kept = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[order(scores)[:count]] = True
    return kept.view_as(scores)


def _start(stored: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if stored is None else stored.to(leaf.device, copy=True)


@dataclass(frozen=True)
class Orthogonality(Laned):
    """`weight` times the mean of `||A A^T - I||_F` and `||B^T B - I||_F` over all A and B of one slot (eq. 4)."""

    slot: str
    weight: float

    @property
    def slots(self) -> tuple[str, ...]:
        return (self.slot,)

    def bind(self, site: Site) -> Guide:
        leaves = site.model.leaves(slot(self.slot))
        names = site.model.shapes.targets
        rows = [leaves[join(self.slot, name, "A")] for name in names]
        columns = [leaves[join(self.slot, name, "B")] for name in names]
        identity = torch.eye(rows[0].shape[-2], device=rows[0].device)

        def penalty(batch: Batch, logits: Tensor) -> Tensor:
            # Transposed here: a view made outside would not be part of this step's graph.
            factors = [*rows, *(B.mT for B in columns)]
            apart = [X @ X.mT - identity for X in factors]
            lanes = site.model.lane_count is not None
            norms = [gap.flatten(1).norm(dim=1) if lanes else gap.norm() for gap in apart]
            return self.weight * torch.stack(norms).mean(0)

        return penalty
