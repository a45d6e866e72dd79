"""How alike two adapters are, from products of their factors (Piorczynski et al. 2025, Table 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from befit.adapters.lowrank import Pair, inner, numerical_rank, spectrum

__all__ = ["factor_cosine", "product_cosine", "subspace_alignment"]


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
    size = math.sqrt(sum(inner(pair, pair) for pair in first)) * math.sqrt(sum(inner(pair, pair) for pair in second))
    return dot / size if size > 0 else 0.0


def subspace_alignment(
    own: Sequence[Pair], merged: Sequence[Pair], rank_rule: Literal["energy", "norm", "reference"] = "energy"
) -> float:
    """Mean over modules of `||Pi dW_own||_F / ||dW_own||_F`, Pi onto the leading left singular vectors of the merged
    update (SAR, Marczak et al. 2025); in [0, 1], and 0 for a module where either update is zero.

    rank_rule  how many vectors: the fewest with 95 % of the squared singular values ("energy") or of their root
               ("norm"); "reference" as the released script, the root and one vector fewer
    """
    ratios = [_alignment(mine, other, rank_rule) for mine, other in zip(own, merged, strict=True)]
    return sum(ratios) / len(ratios)


def _alignment(own: Pair, merged: Pair, rank_rule: str) -> float:
    size = inner(own, own)
    parts = spectrum(merged)
    rank = numerical_rank(parts.sigma)
    if size <= 0 or rank == 0:
        return 0.0
    shares = parts.sigma[:rank].square().cumsum(0) / parts.sigma[:rank].square().sum()
    reached = shares if rank_rule == "energy" else shares.sqrt()
    count = min(rank, int((reached < 0.95 * (1 - 1e-12)).sum()) + 1)
    if rank_rule == "reference":
        count -= 1
    B, A = (factor.double() for factor in own)
    C = parts.left[:, :count].double().T @ B
    inside = float(((C.T @ C) * (A @ A.T)).sum())
    return math.sqrt(min(1.0, max(0.0, inside / size)))
