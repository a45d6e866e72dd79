"""Low-rank updates without their dense product: concatenate, truncate, compare.

A pair is (B, A) with B (d_out, r) and A (r, d_in); its product is B A. Scales are the caller's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["concatenate", "inner", "truncate"]

Pair = tuple[Tensor, Tensor]


def concatenate(first: Pair, second: Pair, weight: float) -> Pair:
    """A pair of rank r1 + r2 whose product is `weight * B1 A1 + (1 - weight) * B2 A2` (Potara specification, 3.4).

    The square roots of the weights go to both factors, so that neither side is scaled up against the other.
    """
    (B1, A1), (B2, A2) = first, second
    w1, w2 = weight**0.5, (1 - weight) ** 0.5
    return torch.cat([w1 * B1, w2 * B2], dim=1), torch.cat([w1 * A1, w2 * A2], dim=0)


def truncate(pair: Pair, rank: int) -> Pair:
    """The best approximation of B A of this rank, balanced: `B^T B = A A^T` (aggregation-guidance.md, section 3.3).

    Two thin QR decompositions and one singular value decomposition of an r x r core, in float64; the largest entry of
    every left vector is made positive, so the result is unique where the singular values are.
    """
    B, A = pair
    Q1, R1 = torch.linalg.qr(B.double())  # (d_out, r), (r, r)
    Q2, R2 = torch.linalg.qr(A.double().T)  # (d_in, r), (r, r)
    u, sigma, vh = torch.linalg.svd(R1 @ R2.T)
    left, right = (Q1 @ u)[:, :rank], (vh @ Q2.T)[:rank]
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()  # (1, rank)
    root = sigma[:rank].sqrt()
    return (left * signs * root).to(B.dtype), (right * signs.T * root[:, None]).to(A.dtype)


def inner(first: Pair, second: Pair) -> float:
    """`<B1 A1, B2 A2> = tr((B1^T B2)(A2 A1^T))`: never larger than r1 x r2."""
    (B1, A1), (B2, A2) = first, second
    return float(((B1.double().T @ B2.double()) * (A1.double() @ A2.double().T)).sum())
