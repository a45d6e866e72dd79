"""Guidance terms: what a pass adds to the task's loss. A term is bound once per update and then called per batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from befit.adapters.keys import join, slot, to_slot
from befit.adapters.lowrank import align
from befit.protocol.work import Work

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site
    from befit.tasks.base import Batch

Guide = Callable[["Batch", Tensor], Tensor]


class Term(Protocol):
    """`bind` is called before the first batch, when the model holds what the client received. What it returns is
    called with each batch and the model's logits for it. A term that names slots says so in `slots`: those that a
    recipe lacks are then refused before a run."""

    def bind(self, site: Site) -> Guide: ...


class Laned:
    """A term that several clients can follow at once: bound while the model has lanes, its guide returns (lanes,).

    alike         terms that are equal in it can be followed at once; the term itself, where all of it has to be equal
    of_weights    whether it depends on the model's arrays alone, and not on the batch
    of_positions  whether it is a mean over the positions of the task's loss, and not over the samples of the batch
    """

    of_weights: ClassVar[bool] = True
    of_positions: ClassVar[bool] = False

    @property
    def alike(self) -> Hashable:
        return self

    def joined(self, others: Sequence[Any]) -> Any:
        """One term for all lanes, this one's first."""
        return self


def total(values: Tensor, model: AdaptedModel) -> Tensor:
    """The sum of all entries of an array as large as one of the model's; of each lane's, where the model has lanes."""
    return values.sum() if model.lane_count is None else values.flatten(1).sum(1)


def task_loss(site: Site, logits: Tensor, batch: Batch) -> Tensor:
    """The task's loss; each lane's, where the model has lanes, or the part of it that the rows of this batch make."""
    rows = site.model.rows
    if rows is None:
        return site.task.loss(logits, batch)
    return rows.sum(site.task.sample_losses(logits, batch, "sum")) / rows.terms


@dataclass(frozen=True)
class L2(Laned):
    """`weight * sum ||theta_slot - theta_to||^2` over all entries, with `to` as it was at the start of the update.

    align  "procrustes" turns the target of every module, once, by the rotation of its ranks that brings it nearest:
           `(A, B) -> (O A, B O^T)` is the same adapter

    `to` may be the slot itself: then it is pulled back to where the update started (FedProx). No factor 1/2 and no
    average over entries, as Ditto has it in snumprlab/fedmosaic.
    """

    slot: str
    to: str
    weight: float
    align: Literal["none", "procrustes"] = "none"

    @property
    def slots(self) -> tuple[str, ...]:
        return self.slot, self.to

    def bind(self, site: Site) -> Guide:
        leaves = site.model.leaves(slot(self.slot))
        there = site.model.leaves(slot(self.to))
        targets = {key: there[to_slot(key, self.to)].detach().clone() for key in leaves}
        if self.align == "procrustes":
            for name in site.model.adapted(self.slot):
                A, B = join(self.slot, name, "A"), join(self.slot, name, "B")
                own = leaves[B].detach(), leaves[A].detach()
                targets[B], targets[A] = align((targets[B], targets[A]), own)
        pairs = [(leaf, targets[key]) for key, leaf in leaves.items()]

        def penalty(batch: Batch, logits: Tensor) -> Tensor:
            squares = [total((value - target).square(), site.model) for value, target in pairs]
            return self.weight * torch.stack(squares).sum(0)

        return penalty


@dataclass(frozen=True)
class ProductDistance(Laned):
    """`weight * sum_modules ||s B A - s B_to A_to||_F^2`, from r x r products.

    It does not depend on which of the many factors of an update the two adapters have. Other arrays of the slots, as
    those of a task head, count entry by entry.
    """

    slot: str
    to: str
    weight: float

    @property
    def slots(self) -> tuple[str, ...]:
        return self.slot, self.to

    def bind(self, site: Site) -> Guide:
        model = site.model
        leaves, there = model.leaves(slot(self.slot)), model.leaves(slot(self.to))
        scale, other = model.layout.slot(self.slot).scale, model.layout.slot(self.to).scale
        pairs = []
        for name in model.adapted(self.slot):
            A, B = (leaves[join(self.slot, name, part)] for part in ("A", "B"))
            A_to, B_to = (there[join(self.to, name, part)].detach().clone() for part in ("A", "B"))
            squares = (B_to.mT @ B_to) * (A_to @ A_to.mT)
            norm = squares.sum() if squares.dim() == 2 else total(squares, model)  # one for all lanes, or of each
            pairs.append((A, B, A_to, B_to, norm))
        rest = [
            (leaf, there[to_slot(key, self.to)].detach().clone())
            for key, leaf in leaves.items()
            if key.rpartition("/")[2] not in ("A", "B")
        ]

        def distance(batch: Batch, logits: Tensor) -> Tensor:
            apart = torch.stack(
                [
                    scale**2 * total((B.mT @ B) * (A @ A.mT), model)
                    + other**2 * norm
                    - 2 * scale * other * total((B_to.mT @ B) * (A_to @ A.mT), model)
                    for A, B, A_to, B_to, norm in pairs
                ]
            ).sum(0)
            for value, target in rest:
                apart = apart + total((value - target).square(), model)
            return self.weight * apart

        return distance


@dataclass(frozen=True)
class Distil(Laned):
    """`weight * T^2 * mean over samples of the mean over tokens of KL`, between the pass's model and a slot's.

    teacher          the slot that is active in the other model; it gets no gradient and no dropout
    temperature      T of `p = softmax(logits / T)`
    direction        "local_global" is KL(p_own || p_teacher), "global_local" the usual KL(p_teacher || p_own), "js" the
                     Jensen-Shannon divergence of the two
    divide_by_vocab  divide by the number of classes, as a mean over all logits does (the paper's formula)

    At the positions of the task's own loss (the printed formula of Piorczynski et al. 2025 is off by one there).
    """

    teacher: str
    temperature: float = 2.0
    direction: Literal["local_global", "global_local", "js"] = "local_global"
    divide_by_vocab: bool = False
    weight: float = 1.0
    of_weights: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[str, ...]:
        return (self.teacher,)

    @property
    def work(self) -> tuple[Work, ...]:
        return (Work(self.slots),)

    def bind(self, site: Site) -> Guide:
        def divergence(batch: Batch, logits: Tensor) -> Tensor:
            model = site.model
            with torch.no_grad(), model.training(False), model.active(self.teacher):
                other = site.logits(batch)
            own, samples = site.task.judged(logits, batch)
            theirs, _ = site.task.judged(other, batch)
            per_token = _divergence(own.float() / self.temperature, theirs.float() / self.temperature, self.direction)
            size, rows = len(batch["labels"]) // site.task.rows_each, model.rows
            counts = samples.new_zeros(size).index_add(0, samples, torch.ones_like(samples)).clamp_min(1)
            shares = per_token / counts[samples]
            mean = shares.sum() / size if rows is None else rows.sum(shares, samples) / rows.samples
            classes = own.shape[-1] if self.divide_by_vocab else 1
            return self.weight * self.temperature**2 / classes * mean

        return divergence


def _divergence(own: Tensor, theirs: Tensor, direction: str) -> Tensor:
    """(rows,) from logits (rows, classes)."""
    p, q = own.log_softmax(-1), theirs.log_softmax(-1)
    if direction == "local_global":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "global_local":
        return (q.exp() * (q - p)).sum(-1)
    middle = torch.logaddexp(p, q) - math.log(2)
    return ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / 2


@dataclass(frozen=True)
class Tilt(Laned):
    """`<direction, theta>`: adds `direction` to the gradient, whatever the optimiser makes of it (SCAFFOLD).

    direction  arrays by the keys of what is trained
    """

    direction: Mapping[str, Tensor]

    @property
    def alike(self) -> Hashable:
        return type(self)

    def joined(self, others: Sequence[Tilt]) -> Tilt:
        terms = [self, *others]
        return Tilt({key: torch.stack([term.direction[key] for term in terms]) for key in self.direction})

    def bind(self, site: Site) -> Guide:
        leaves = site.model.leaves(lambda key: key in self.direction)  # type: ignore[arg-type]
        pairs = [(leaf, self.direction[key].to(leaf.device)) for key, leaf in leaves.items()]

        def tilt(batch: Batch, logits: Tensor) -> Tensor:
            return torch.stack([total(leaf * direction, site.model) for leaf, direction in pairs]).sum(0)

        return tilt
