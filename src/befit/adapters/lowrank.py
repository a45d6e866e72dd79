"""Low-rank updates without their dense product: concatenate, decompose, truncate, compare.

A pair is (B, A) with B (d_out, r) and A (r, d_in); its product is B A. Scales are the caller's business. Nothing here
forms an array of d_out x d_in: decompositions work on cores of r x r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Pair = tuple[Tensor, Tensor]
RankRule = Literal["energy", "norm", "error", "reference"]


def stack(pairs: Sequence[Pair], weights: Sequence[float]) -> Pair:
    """A pair of rank sum r_k whose product is `sum_k w_k B_k A_k`, exactly; weights may be negative.

    The square roots of the weights go to both factors, so that neither side is scaled up against the other.
    """
    roots = [abs(weight) ** 0.5 for weight in weights]
    signed = [-root if weight < 0 else root for root, weight in zip(roots, weights, strict=True)]
    B = torch.cat([root * B for root, (B, _) in zip(signed, pairs, strict=True)], dim=1)  # (d_out, sum r_k)
    A = torch.cat([root * A for root, (_, A) in zip(roots, pairs, strict=True)], dim=0)  # (sum r_k, d_in)
    return B, A


def concatenate(first: Pair, second: Pair, weight: float) -> Pair:
    """A pair of rank r1 + r2 whose product is `weight * B1 A1 + (1 - weight) * B2 A2`."""
    return stack((first, second), (weight, 1 - weight))


@dataclass(frozen=True)
class Frame:
    """The orthonormal factor Q (d, m) of a QR decomposition, as reflectors: it is applied, and formed only if asked."""

    reflectors: Tensor
    tau: Tensor

    def apply(self, core: Tensor) -> Tensor:
        """Q X (d, n) for X (m, n): O(d m n), less than forming Q where n is below m."""
        padded = core.new_zeros(len(self.reflectors), core.shape[1])
        padded[: len(core)] = core
        return torch.ormqr(self.reflectors, self.tau, padded)


def frame(matrix: Tensor) -> tuple[Frame, Tensor]:
    """`matrix = Q R` with Q (d, m) and R (m, n), m = min(d, n)."""
    reflectors, tau = torch.geqrf(matrix)
    size = min(matrix.shape)
    return Frame(reflectors[:, :size], tau), reflectors[:size].triu()


@dataclass(frozen=True)
class Spectrum:
    """A singular value decomposition `left diag(sigma[:n]) right` of a product, n vectors and all singular values.

    left  (d_out, n), right (n, d_in); sigma (m,) in descending order, m the smallest of both ranks and widths. The
    largest entry of every left vector is positive, so the vectors are unique where the singular values are.
    """

    left: Tensor
    sigma: Tensor
    right: Tensor

    def balanced(self, scale: float = 1.0) -> Pair:
        """(B, A) with `scale B A = left diag(sigma) right` and `B^T B = A A^T = diag(sigma) / scale`."""
        root = (self.sigma[: self.left.shape[1]] / scale).sqrt()
        return self.left * root, self.right * root[:, None]

    def in_B(self, scale: float = 1.0) -> Pair:
        """(B, A) with `scale B A = left diag(sigma) right`, all singular values in B, and `A A^T` the identity."""
        return self.left * (self.sigma[: self.left.shape[1]] / scale), self.right

    def energy(self, count: int) -> float:
        """Share of the squared singular values that the first `count` hold; 1 for a product of zero."""
        total = float(self.sigma.square().sum())
        return float(self.sigma[:count].square().sum()) / total if total > 0 else 1.0


def spectrum(pair: Pair, rank: int | None = None, dtype: torch.dtype = torch.float64) -> Spectrum:
    """The leading `rank` singular vectors of B A, all of them for None, and all its singular values, in `dtype`.

    Two QR decompositions and one singular value decomposition of a core no larger than r x r:
    O((d_out + d_in) r^2 + r^3).
    """
    B, A = pair
    Q1, R1 = frame(B.to(dtype))  # R1 (m1, r)
    Q2, R2 = frame(A.to(dtype).T)  # R2 (m2, r)
    u, sigma, vh = torch.linalg.svd(R1 @ R2.T, full_matrices=False)
    left, right = Q1.apply(u[:, :rank]), Q2.apply(vh[:rank].T).T
    signs = signs_of(left)  # (n,)
    return Spectrum(left * signs, sigma, right * signs[:, None])


def signs_of(left: Tensor) -> Tensor:
    """The sign of the largest entry of every column: +1 or -1."""
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))[0]
    return torch.where(largest < 0, -1.0, 1.0).to(left.dtype)


def numerical_rank(sigma: Tensor, tolerance: float | None = None) -> int:
    """How many of the descending singular values are above `tolerance` times the first; 0 where all are zero.

    tolerance  None takes that of the type of sigma
    """
    tolerance = negligible(sigma.dtype) if tolerance is None else tolerance
    return int((sigma > tolerance * sigma[0]).sum()) if len(sigma) else 0


def negligible(dtype: torch.dtype) -> float:
    """What counts as zero beside the largest singular value of arrays of a type, well above what rounding leaves.

    Arrays that were rounded to float32 have directions that mean nothing at about 1e-7, in whatever type they are
    decomposed: so it is the type of the factors that decides, not that of the decomposition.

    >>> negligible(torch.float64), negligible(torch.float32)
    (1e-10, 1e-05)
    """
    return 1e-10 if dtype == torch.float64 else 1e-5


def truncate(pair: Pair, rank: int) -> Pair:
    """The best approximation of B A of this rank, balanced: `B^T B = A A^T`; ranks that B A does not have are zero.

    Computed in float64 and returned in the types of the factors.
    """
    B, A = widened(spectrum(pair, rank).balanced(), rank)
    return B.to(pair[0].dtype), A.to(pair[1].dtype)


def widened(pair: Pair, rank: int) -> Pair:
    """The same product at a rank that is no lower, such as one above the width of the module."""
    B, A = pair
    spare = rank - len(A)
    return pad(B, (0, spare)), pad(A, (0, 0, 0, spare))


def inner(first: Pair, second: Pair) -> float:
    """`<B1 A1, B2 A2> = tr((B1^T B2)(A2 A1^T))`: never larger than r1 x r2."""
    (B1, A1), (B2, A2) = first, second
    return float(((B1.double().T @ B2.double()) * (A1.double() @ A2.double().T)).sum())


def product_norm(pair: Pair) -> float:
    """`||B A||_F`: the root of `inner(pair, pair)`, which rounding can take below 0 where products cancel."""
    return math.sqrt(max(0.0, inner(pair, pair)))


def align(pair: Pair, to: Pair) -> Pair:
    """`(B O^T, O A)` with the rotation O of the ranks that brings it nearest to `to`, factor by factor (Procrustes).

    `O = U V^T` of the SVD `U S V^T` of `A_to A^T + B_to^T B`; the product does not change. Both need the same rank.
    """
    B, A = pair
    B_to, A_to = to
    u, _, vh = torch.linalg.svd((A_to @ A.mT + B_to.mT @ B).double())
    rotation = (u @ vh).to(A.dtype)
    return B @ rotation.mT, rotation @ A


# How alike two adapters are, from products of their factors (Piorczynski et al. 2025, Table 3).


def factor_cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Cosine of all entries of A and B of all modules as two long vectors; 0 where one of them is zero.

    The random start of A, which both share, weighs in it.
    """
    dot = sum(float((tensor.double() * second[key].double()).sum()) for key, tensor in first.items())
    lengths = math.prod(
        math.sqrt(sum(float(t.double().square().sum()) for t in arrays.values())) for arrays in (first, second)
    )
    return dot / lengths if lengths > 0 else 0.0


def product_cosine(first: Sequence[Pair], second: Sequence[Pair]) -> float:
    """Cosine of the updates `B A` of all modules: the same for all factors of an update; 0 where one is zero."""
    dot = sum(inner(mine, other) for mine, other in zip(first, second, strict=True))
    size = math.hypot(*map(product_norm, first)) * math.hypot(*map(product_norm, second))
    return dot / size if size > 0 else 0.0


def subspace_alignment(own: Sequence[Pair], merged: Sequence[Pair], rank_rule: RankRule = "energy") -> float:
    """Mean over modules of `||Pi dW_own||_F / ||dW_own||_F`, Pi onto the leading left singular vectors of the merged
    update (SAR, Marczak et al. 2025); in [0, 1], and 0 for a module where either update is zero.

    rank_rule  how many vectors: the fewest with 95 % of the squared singular values ("energy") or of their root
               ("norm"); the fewest that leave an error of 5 %, `||dW - Pi dW||_F <= 0.05 ||dW||_F` ("error", as
               the paper has it), which is 99.75 % of the squares; "reference" as the released script, the root and one
               vector fewer
    """
    ratios = [_alignment(mine, other, rank_rule) for mine, other in zip(own, merged, strict=True)]
    return sum(ratios) / len(ratios)


def _alignment(own: Pair, merged: Pair, rank_rule: RankRule) -> float:
    size = inner(own, own)
    parts = spectrum(merged)
    rank = numerical_rank(parts.sigma)
    if size <= 0 or rank == 0:
        return 0.0
    shares = parts.sigma[:rank].square().cumsum(0) / parts.sigma[:rank].square().sum()
    wanted = {"energy": 0.95, "error": 1 - 0.05**2}.get(rank_rule, 0.95**2)
    count = min(rank, int((shares < wanted * (1 - 1e-12)).sum()) + 1)
    if rank_rule == "reference":
        count -= 1
    B, A = (factor.double() for factor in own)
    C = parts.left[:, :count].double().T @ B
    inside = float(((C.T @ C) * (A @ A.T)).sum())
    return math.sqrt(min(1.0, max(0.0, inside / size)))
