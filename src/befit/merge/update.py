"""A merged update of one module in low-rank form, before it becomes an adapter again.

It is either folded into a backbone as it is (ReLoRA), which `pair` is for, or cut down to an adapter, by `spectrum`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from befit.adapters.lowrank import Pair, Spectrum, numerical_rank, signs_of, spectrum
from befit.merge.knots import SharedBasis
from befit.merge.rules import Isotropic

Split = Literal["even", "B"]


class LowRankUpdate(Protocol):
    """`dW_G` (d_out, d_in) of one module; nothing of it is as large as that."""

    def pair(self) -> Pair:
        """(P, Q) with P (d_out, R) and Q (R, d_in) whose product is the whole update."""
        ...

    def spectrum(self, rank: int | None = None) -> Spectrum:
        """Its leading singular vectors and all its singular values."""
        ...


@dataclass(frozen=True)
class Product:
    """`B A`, with the type that decompositions are made in."""

    B: Tensor
    A: Tensor
    dtype: torch.dtype = torch.float64

    def pair(self) -> Pair:
        return self.B, self.A

    def spectrum(self, rank: int | None = None) -> Spectrum:
        return spectrum(self.pair(), rank, self.dtype)


@dataclass(frozen=True)
class InBasis:
    """`U M` with the shared basis U and merged coordinates M (R, d_in)."""

    basis: SharedBasis
    coordinates: Tensor

    def pair(self) -> Pair:
        return self.basis.left.to(self.coordinates.dtype), self.coordinates

    def spectrum(self, rank: int | None = None) -> Spectrum:
        return self.basis.spectrum(self.coordinates, rank)


@dataclass(frozen=True)
class Flattened:
    """`scale` times an update whose singular values are all replaced by their mean (Iso-C, Marczak et al. 2025).

    Of what is cut to a rank the level may be that of the directions that stay: see `Isotropic`.
    """

    update: LowRankUpdate
    rule: Isotropic
    shape: tuple[int, int]
    scale: float = 1.0

    def pair(self) -> Pair:
        return self.spectrum().balanced()

    def spectrum(self, rank: int | None = None) -> Spectrum:
        whole = self.update.spectrum(rank)
        level, kept = self.rule.level(whole.sigma, self.shape, rank)
        directions = numerical_rank(whole.sigma, self.rule.tolerance)  # with those that truncation loses
        sigma = whole.sigma.new_full((directions,), self.scale * level)
        return Spectrum(whole.left[:, :kept], sigma, whole.right[:kept])


@dataclass(frozen=True)
class FlattenedDirections:
    """`scale level U Sigma F`: F (R, d_in) is the mean M of the `V_k^T` with singular values of 1 (Iso-C of V).

    Sigma is not flattened, so it decides what a cut keeps. The level of directions L (R, r) that are kept is the mean
    of `(M M^T)^(1/2)` over them: the mean of the singular values of M where that is all.
    """

    basis: SharedBasis
    mean: Tensor
    rule: Isotropic
    scale: float = 1.0

    def pair(self) -> Pair:
        left, sigma, right = self._decomposed()
        level, _ = self.rule.level(sigma, (len(left), right.shape[1]), None)
        return InBasis(self.basis, self.scale * level * self.basis.sigma[:, None] * (left @ right)).pair()

    def spectrum(self, rank: int | None = None) -> Spectrum:
        left, sigma, right = self._decomposed()
        whole = self.basis.spectrum(self.basis.sigma[:, None] * (left @ right), rank)
        level, _ = self.rule.level(sigma, (len(left), right.shape[1]), None)
        if rank is not None and self.rule.mean == "kept" and len(sigma):
            shares = (left.T @ (self.basis.left.T @ whole.left)).square().sum(1)  # of what is kept, by direction of M
            level = float((shares * sigma).sum() / shares.sum())
        return Spectrum(whole.left, self.scale * level * whole.sigma, whole.right)

    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        left, sigma, right = torch.linalg.svd(self.mean, full_matrices=False)
        rank = numerical_rank(sigma, self.rule.tolerance)
        return left[:, :rank], sigma[:rank], right[:rank]


@dataclass(frozen=True)
class DenseUpdate:
    """The oracle: an update as (d_out, d_in), whose decomposition costs O(d_out d_in min(d_out, d_in))."""

    delta: Tensor
    dtype: torch.dtype = torch.float64

    def pair(self) -> Pair:
        return self.spectrum().balanced()

    def spectrum(self, rank: int | None = None) -> Spectrum:
        u, sigma, vh = torch.linalg.svd(self.delta.to(self.dtype), full_matrices=False)
        signs = signs_of(u[:, :rank])
        return Spectrum(u[:, :rank] * signs, sigma, vh[:rank] * signs[:, None])


@dataclass(frozen=True)
class FinishedModule:
    """An adapter of one module: `scale B A` is the best approximation of its rank of the merged update.

    energy  share of the squared singular values that are in it; 1 for an update of zero
    norm    Frobenius norm of the whole update
    filled  how many of the ranks are more than the update has: zero in B, random in A
    """

    B: Tensor
    A: Tensor
    energy: float
    norm: float
    filled: int = 0


def finish(
    update: LowRankUpdate,
    rank: int,
    scale: float,
    generator: torch.Generator,
    spare: Tensor | None = None,
    split: Split = "even",
    tolerance: float | None = None,
) -> FinishedModule:
    """Back to LoRA factors of a given rank, in the type of decompositions.

    scale      the adapter's own, divided out here and nowhere else
    generator  for the rows of A beyond the rank of the update, which get a fresh start: uniform within
               1 / sqrt(d_in), as LoRA starts
    spare      (rank, d_in) rows to take instead where the update is zero, so that the present A is kept
    split      who gets the singular values S of `U S V^T`: "even", `B^T B = A A^T = S / scale`; "B", `B = U S / scale`
               and `A = V^T` (FlexLoRA, Bai et al. 2024)
    tolerance  below this share of the largest a singular value is rounding: `negligible` of the type of the factors
               that were merged; None takes that of the decomposition's
    """
    merged = update.spectrum(rank)
    B, A = merged.balanced(scale) if split == "even" else merged.in_B(scale)
    norm = float(merged.sigma.square().sum().sqrt())
    used = min(B.shape[1], numerical_rank(merged.sigma, tolerance))
    missing = rank - used
    if missing:
        start = (2 * torch.rand(rank, A.shape[1], generator=generator, dtype=A.dtype) - 1) / math.sqrt(A.shape[1])
        rows = spare.to(A.dtype) if spare is not None and used == 0 else start.to(A.device)
        B = torch.cat([B[:, :used], B.new_zeros(len(B), missing)], dim=1)
        A = torch.cat([A[:used], rows[used:]], dim=0)
    return FinishedModule(B, A, merged.energy(used), norm, missing)
