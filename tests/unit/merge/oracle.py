"""The merging mathematics as textbooks write it: dense, in float64, entry by entry or by whole decompositions.

Nothing here is shared with the package. A "federation" is a list of updates `(B, A, s)` to one module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Updates = list[tuple[Tensor, Tensor, float]]


def random_updates(
    ranks: Sequence[int] = (3, 3, 3),
    d_out: int = 13,
    d_in: int = 11,
    seed: int = 0,
    scales: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Updates:
    random = torch.Generator().manual_seed(seed)
    scales = scales or [1.0] * len(ranks)
    return [
        (
            torch.randn(d_out, r, generator=random, dtype=torch.float64).to(dtype),
            torch.randn(r, d_in, generator=random, dtype=torch.float64).to(dtype),
            s,
        )
        for r, s in zip(ranks, scales, strict=True)
    ]


def deltas(updates: Updates) -> list[np.ndarray]:
    return [s * (B.double() @ A.double()).numpy() for B, A, s in updates]


def mean(parts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    return sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)  # type: ignore[return-value]


def trimmed(part: np.ndarray, density: float) -> np.ndarray:
    """The largest entries, by sorting all; of equal ones the first."""
    count = max(1, math.floor(density * part.size + 1e-9))
    order = np.argsort(-np.abs(part).ravel(), kind="stable")[:count]
    kept = np.zeros(part.size)
    kept[order] = part.ravel()[order]
    return kept.reshape(part.shape)


def ties(parts: Sequence[np.ndarray], weights: Sequence[float], density: float, trim: bool = True) -> np.ndarray:
    """TIES entry by entry (Yadav et al. 2023, Algorithm 1)."""
    kept = [trimmed(part, density) for part in parts] if trim else list(parts)
    merged = np.zeros(kept[0].shape)
    for place in np.ndindex(merged.shape):
        values = [part[place] for part in kept]
        sign = 1.0 if sum(w * v for w, v in zip(weights, values, strict=True)) >= 0 else -1.0
        agreeing = [(w, v) for w, v in zip(weights, values, strict=True) if v * sign > 0]
        if sum(w for w, _ in agreeing) > 0:
            merged[place] = sum(w * v for w, v in agreeing) / sum(w for w, _ in agreeing)
    return merged


def stack_svd(parts: Sequence[np.ndarray], tolerance: float = 1e-10) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """U, sigma and V_k^T of `[dW_1 ... dW_K]`."""
    u, sigma, vh = np.linalg.svd(np.concatenate(parts, axis=1), full_matrices=False)
    rank = int((sigma > tolerance * sigma[0]).sum())
    width = parts[0].shape[1]
    return u[:, :rank], sigma[:rank], [vh[:rank, k * width : (k + 1) * width] for k in range(len(parts))]


def iso_c(matrix: np.ndarray, tolerance: float = 1e-10) -> np.ndarray:
    u, sigma, vh = np.linalg.svd(matrix, full_matrices=False)
    rank = int((sigma > tolerance * sigma[0]).sum())
    return sigma[:rank].mean() * u[:, :rank] @ vh[:rank]


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The best approximation of a rank (Eckart and Young)."""
    u, sigma, vh = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * sigma[:rank]) @ vh[:rank]
