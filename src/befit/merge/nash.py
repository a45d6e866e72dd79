"""Weights that clients would agree on: the Nash bargaining solution of their updates (FedMosaic, Table 33).

The paper (Seo et al. 2026, Table 33) names the solution and no more: the reference point and the arrays are our choice,
see docs/methods/fedmosaic.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 200
_TOLERANCE = 1e-12  # largest `|a_j (K a)_j - 1|` of the result, as far as rounding lets it be so small


def nash_weights(gram: Tensor, ridge: float = 1e-8) -> Tensor:
    """`w = a / sum(a)` with `K a = 1 / a`, `a > 0`: (N,) float64, positive, of sum 1.

    gram   `D^T D` (N, N) of the updates D (entries, N), each a column
    ridge  `K = gram + ridge * trace / N * I`, so that updates that depend on each other have one solution

    `a` minimises `a^T K a / 2 - sum log a_j`, which is strictly convex: Newton's method, each step damped by
    `1 / (1 + lambda)` while its decrement lambda is large, always arrives (the function is self-concordant). A client
    whose update is short, or opposes all others, gets more. Equal for orthonormal updates, and where all are zero.
    Raises ValueError for a matrix that is not square and finite.

    >>> [round(weight, 6) for weight in nash_weights(torch.diag(torch.tensor([1.0, 4.0]))).tolist()]
    [0.666667, 0.333333]
    """
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1] or not len(gram) or not gram.isfinite().all():
        raise ValueError(
            f"updates are weighed by the square matrix of their products, got {tuple(gram.shape)}"
            f"{'' if gram.isfinite().all() else ' with values that are not finite'}"
        )
    N, K = len(gram), gram.double().cpu()
    size = float(K.trace()) / N
    if not size > 0:
        return torch.full((N,), 1 / N, dtype=torch.float64)
    K = K / size + ridge * torch.eye(N, dtype=torch.float64)  # weights do not depend on the size of all updates
    a = K.diagonal().rsqrt()
    for _ in range(_STEPS):
        gradient = K @ a - 1 / a
        if float((a * gradient).abs().max()) < _TOLERANCE:
            break
        step = torch.linalg.solve(K + torch.diag(a**-2), -gradient)
        decrement = float((-(gradient @ step)).clamp_min(0).sqrt())
        a = a + step / (1 + decrement if decrement > 0.25 else 1)
    return a / a.sum()
