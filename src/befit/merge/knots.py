"""KnOTS (Stoica et al. 2025): one left basis for the updates of all clients, without their dense products.

`[dW_1 ... dW_K] = U Sigma [V_1^T ... V_K^T]`, the singular value decomposition of all updates side by side, from thin
QR decompositions of the factors (docs/methods/guidance.md, Merging). With `dW_k = s_k B_k A_k`:

    [B_1 ... B_K] = Q_B R_B          s_k A_k^T = Q_k T_k         C = [R_B1 T_1^T ... R_BK T_K^T]
    C = U_c Sigma [W_1^T ... W_K^T]  U = Q_B U_c                 V_k^T = W_k^T Q_k^T

The outer factors are orthonormal, so this is the decomposition of the stack itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from befit.adapters.lowrank import Frame, Pair, Spectrum, frame, negligible, numerical_rank, signs_of


@dataclass(frozen=True)
class SharedBasis:
    """The shared left basis U (d_out, R), and what gives each client's coordinates in it.

    sigma  (R,) singular values of the stack above the tolerance, descending
    inner  per client, W_k^T (R, q_k); a row is zero where the client has next to nothing in that direction
    outer  per client, Q_k^T (q_k, d_in), orthonormal rows
    floor  coordinates no larger than this are zero
    U itself is kept as `frame` (d_out, m) and `core` (m, R): it is applied more often than it is needed.
    """

    frame: Frame
    core: Tensor
    sigma: Tensor
    inner: Sequence[Tensor]
    outer: Sequence[Tensor]
    floor: float = 0.0

    @property
    def left(self) -> Tensor:
        """U (d_out, R), orthonormal columns; the largest entry of each is positive."""
        return self.frame.apply(self.core)

    @property
    def rank(self) -> int:
        return len(self.sigma)

    def directions(self, client: int) -> Tensor:
        """`V_k^T` (R, d_in): summed over clients, `V_k^T V_k` is the identity."""
        return self.coordinates(client) / self.sigma[:, None]

    def coordinates(self, client: int) -> Tensor:
        """`Sigma V_k^T` (R, d_in): the update of a client in the basis, `dW_k = U Sigma V_k^T`.

        What is zero but for rounding is zero, or else it would have a vote like any other entry.
        """
        values = (self.sigma[:, None] * self.inner[client]) @ self.outer[client]
        return torch.nn.functional.hardshrink(values, self.floor)

    def spectrum(self, coordinates: Tensor, rank: int | None = None) -> Spectrum:
        """The singular value decomposition of `U M` for M (R, d_in); U, being orthonormal, needs no QR of its own."""
        Q, R = frame(coordinates.to(self.core.dtype).T)
        u, sigma, vh = torch.linalg.svd(R.T, full_matrices=False)
        left, right = self.frame.apply(self.core @ u[:, :rank]), Q.apply(vh[:rank].T).T
        signs = signs_of(left)
        return Spectrum(left * signs, sigma, right * signs[:, None])


def shared_basis(
    pairs: Sequence[Pair], scales: Sequence[float], tolerance: float | None = None, dtype: torch.dtype = torch.float64
) -> SharedBasis:
    """The basis of K updates `s_k B_k A_k`, whose ranks may differ, in `dtype`.

    tolerance  directions whose singular values are below it, relative to the largest, are dropped, and so is a client's
               part of a direction that is no longer; None decides by the type of the factors

    Cost O((d_out + d_in) R^2 + R^3) with R the sum of the ranks, against O(K d_out^2 d_in) for the dense stack.
    """
    Q_B, R_B = frame(torch.cat([B for B, _ in pairs], dim=1).to(dtype))  # R_B (m, sum r_k)
    blocks: list[Tensor] = []
    outer: list[Tensor] = []
    start = 0
    for (_, A), scale in zip(pairs, scales, strict=True):
        Q, T = torch.linalg.qr(scale * A.to(dtype).T)  # (d_in, q_k), (q_k, r_k)
        blocks.append(R_B[:, start : start + len(A)] @ T.T)  # (m, q_k)
        outer.append(Q.T)
        start += len(A)
    u, sigma, vh = torch.linalg.svd(torch.cat(blocks, dim=1), full_matrices=False)
    tolerance = negligible(pairs[0][1].dtype) if tolerance is None else tolerance
    rank = numerical_rank(sigma, tolerance)
    floor = negligible(dtype) * float(sigma[0]) / pairs[0][1].shape[1] ** 0.5
    signs = signs_of(Q_B.apply(u[:, :rank])) if rank else u.new_ones(0)
    ends = [0, *torch.tensor([len(Q) for Q in outer]).cumsum(0).tolist()]
    inner = [signs[:, None] * vh[:rank, a:b] for a, b in pairwise(ends)]
    inner = [part * (sigma[:rank, None] * part.norm(dim=1, keepdim=True) > tolerance * sigma[0]) for part in inner]
    return SharedBasis(Q_B, u[:, :rank] * signs, sigma[:rank], inner, outer, floor)
