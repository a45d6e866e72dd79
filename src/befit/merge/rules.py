"""What becomes of K tensors of one shape: one tensor of that shape (docs/methods/guidance.md, Merging).

Which tensors these are is decided by the space: factors, coordinates in a shared basis, or dense updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from befit.adapters.lowrank import negligible, numerical_rank
from befit.merge.trim import Cut, cut_of, cuts_of_stream, kept_count, passes_of, trim


@dataclass(frozen=True)
class Elementwise:
    """Rules that treat every entry alike: sparsify each tensor, elect a sign for each entry, combine what agrees.

    sparsify   "trim" keeps the largest entries of a tensor, "drop" keeps each with probability `density` and divides
               it by `density` (DARE, Yu et al. 2024, eq. 2)
    density    share of the entries that is kept
    elect      the sign of an entry: of the weighted "sum" of the clients' values or of the "count" of their signs, of
               which a tie goes to the sum; an entry of the other sign is left out (TIES, Yadav et al. 2023, algorithm
               1); "none" combines all
    combine    "mean" divides by the weights that entered an entry, "sum" does not
    scope      trimming counts the entries of one "tensor" or of all tensors of the "adapter"
    zero_sign  what an elected sign of zero becomes: "plus", or the "majority" of the signs in the scope
    reference  keep one entry more and all that are equal to the smallest one kept, as the public TIES code does

    Mean: FedAvg. Sum: Task Arithmetic. Trim, elect, mean: TIES. Drop, mean: DARE. Drop, elect, mean: DARE-TIES.
    """

    sparsify: Literal["none", "trim", "drop"] = "none"
    density: float = 1.0
    elect: Literal["none", "sum", "count"] = "none"
    combine: Literal["mean", "sum"] = "mean"
    scope: Literal["tensor", "adapter"] = "tensor"
    zero_sign: Literal["plus", "majority"] = "plus"
    reference: bool = False

    @property
    def linear(self) -> bool:
        """Whether the result is a weighted sum of the inputs."""
        return self.sparsify == "none" and self.elect == "none"

    def passes(self, dtype: torch.dtype) -> int:
        """How often the rule goes over all tensors of an adapter, of this type."""
        if self.scope == "tensor":
            return 1
        searches = self.sparsify == "trim" and self.density < 1
        majority = self.elect != "none" and self.zero_sign == "majority"
        return 1 + searches * passes_of(dtype) + majority

    def shares(self, weights: Sequence[float]) -> list[float]:
        """The coefficient of each client in a linear rule."""
        total = sum(weights) if self.combine == "mean" else 1.0
        return [weight / total for weight in weights]


@dataclass(frozen=True)
class Isotropic:
    """Iso-C (Marczak et al. 2025): the weighted mean with all its singular values replaced by their mean.

    mean       the mean over the values that are kept after truncation ("kept": all where nothing is cut), over all
               above the tolerance ("rank"), or the sum over the smaller side of the matrix ("full", as the public code)
    tolerance  values below it, relative to the largest, count as zero; None decides by the type of what is merged

    Deviation: the public code flattens the sum, K times the mean, and gives the arbitrary null-space directions of a
    low-rank update the same weight; here they stay out. A mean of K clients has up to K times their rank: cut to that
    rank, at the mean over "rank", about 1 / K of it would be left.
    """

    mean: Literal["kept", "rank", "full"] = "kept"
    tolerance: float | None = None

    def of(self, dtype: torch.dtype) -> Isotropic:
        """The rule for factors of this type, in whatever type they are decomposed."""
        return self if self.tolerance is not None else replace(self, tolerance=negligible(dtype))

    def passes(self, dtype: torch.dtype) -> int:
        """How often the rule goes over all tensors of an adapter."""
        return 1

    def level(self, sigma: Tensor, shape: tuple[int, int], kept: int | None) -> tuple[float, int]:
        """The common singular value and how many directions get it, of a matrix of `shape` truncated to `kept`.

        Directions are ordered by their singular values before flattening, since all are equal afterwards.
        """
        rank = numerical_rank(sigma, self.tolerance)
        kept = rank if kept is None else min(kept, rank)
        counted = kept if self.mean == "kept" else rank
        size = min(shape) if self.mean == "full" else counted
        return (float(sigma[:counted].sum()) / size if rank else 0.0), kept


Rule = Elementwise | Isotropic


@dataclass(frozen=True)
class ClientTensors:
    """K tensors of one shape, one from each client, under a name; `context` is what the space needs to go back."""

    name: str
    parts: Sequence[Tensor]
    context: Any = None


def weighted_sum(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """`sum_k p_k X_k` in the type of the tensors."""
    total = torch.zeros_like(parts[0])
    for part, share in zip(parts, shares, strict=True):
        total.add_(part, alpha=share)
    return total


def isotropic(matrix: Tensor, rule: Isotropic) -> Tensor:
    """`level U V^T` over the directions of a matrix that are not zero; for tall or wide matrices, by a thin SVD."""
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    level, kept = rule.level(sigma, (matrix.shape[0], matrix.shape[1]), None)
    return level * (u[:, :kept] @ vh[:kept])


def apply_elementwise(
    rule: Elementwise,
    entries: Callable[[], Iterable[ClientTensors]],
    weights: Sequence[float],
    draw: Callable[[int, str], torch.Generator],
) -> Iterator[tuple[ClientTensors, Tensor]]:
    """One merged tensor for every entry, in order. Each call of `entries` may compute them again.

    weights  one per client, non-negative; what they sum to matters only for `combine="sum"`
    draw     the generator for a client (by number) and an entry's name
    A rule that looks at a whole adapter goes over the entries more than once.
    """

    def pass_over() -> Iterator[tuple[ClientTensors, list[Tensor]]]:
        cuts = list(first_cuts)
        for entry in entries():
            yield entry, [_sparse(rule, entry, k, part, cuts, draw) for k, part in enumerate(entry.parts)]

    first_cuts: list[Cut] = []
    if rule.sparsify == "trim" and rule.scope == "adapter" and rule.density < 1:
        first_cuts = cuts_of_stream(lambda: (entry.parts for entry in entries()), rule.density, rule.reference)
    zero = 1.0
    if rule.elect != "none" and rule.zero_sign == "majority" and rule.scope == "adapter":
        zero = _sign(sum(float(_elected(rule, parts, weights).sum()) for _, parts in pass_over()))
    for entry, parts in pass_over():
        if rule.elect == "none":
            yield entry, weighted_sum(parts, rule.shares(weights))
            continue
        sign = _elected(rule, parts, weights)
        if rule.zero_sign == "majority" and rule.scope == "tensor":
            zero = _sign(float(sign.sum()))
        yield entry, _combine_agreeing(rule, parts, weights, torch.where(sign == 0, zero, sign))


def _sign(value: float) -> float:
    """+1 or -1; a vector without a majority counts as positive."""
    return -1.0 if value < 0 else 1.0


def _sparse(
    rule: Elementwise,
    entry: ClientTensors,
    client: int,
    part: Tensor,
    cuts: list[Cut],
    draw: Callable[[int, str], torch.Generator],
) -> Tensor:
    if rule.sparsify == "none" or rule.density == 1 or not part.numel():
        return part
    if rule.sparsify == "drop":
        kept = torch.rand(part.shape, generator=draw(client, entry.name)) < rule.density
        return part * kept.to(part.device) / rule.density
    if rule.scope == "adapter":
        values, cuts[client] = trim(part, cuts[client])
        return values
    cut = cut_of(part, kept_count(rule.density, part.numel(), rule.reference))
    return trim(part, Cut(cut.magnitude, part.numel()) if rule.reference else cut)[0]


def _elected(rule: Elementwise, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sign of every entry, or zero where the clients cancel."""
    total = weighted_sum(parts, weights)
    if rule.elect == "count":
        counts = weighted_sum([part.sign() for part in parts], [1.0] * len(parts))
        total = torch.where(counts == 0, total, counts)
    return total.sign_()


def _combine_agreeing(rule: Elementwise, parts: Sequence[Tensor], weights: Sequence[float], sign: Tensor) -> Tensor:
    """The disjoint mean or sum: over the clients whose entry is not zero and has the elected sign."""
    total, entered = torch.zeros_like(sign), torch.zeros_like(sign)
    for part, weight in zip(parts, weights, strict=True):
        agreeing = (part * sign).relu_()  # its magnitude where it agrees, else zero
        total.add_(agreeing, alpha=weight)
        entered.add_(agreeing.sign_(), alpha=weight)
    if rule.combine == "mean":
        total = torch.where(entered > 0, total / entered, 0.0)
    return total.mul_(sign)
