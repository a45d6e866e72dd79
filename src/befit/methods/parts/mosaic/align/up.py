"""B by canonical correlations: the other model's up-projection turned so that cores mean the same (FedMosaic, eq. 19).

Everything happens in the r dimensions of `Z = X A^T`: with orthonormal B_i and B_j this is the recipe on outputs
`H = Z B^T` of full width, exactly (Seo et al. 2026, eq. 19).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.core.errors import DataError
from befit.methods.parts.mosaic.align.features import Pairs

__all__ = ["UpSums", "add_batch", "turn"]


@dataclass
class UpSums:
    """Streamed sums of one site, float64: tokens, `sum z` (r,) and `sum z z^T` (r, r) of pivot (i) and other (j)."""

    count: int
    z_i: Tensor
    z_j: Tensor
    S_ii: Tensor
    S_jj: Tensor
    S_ji: Tensor

    @classmethod
    def of(cls, Z_i: Tensor, Z_j: Tensor) -> UpSums:
        """Of n tokens: Z (n, r)."""
        Z_i, Z_j = Z_i.double(), Z_j.double()
        return cls(len(Z_i), Z_i.sum(0), Z_j.sum(0), Z_i.T @ Z_i, Z_j.T @ Z_j, Z_j.T @ Z_i)

    def __add__(self, other: UpSums) -> UpSums:
        return UpSums(
            self.count + other.count,
            self.z_i + other.z_i,
            self.z_j + other.z_j,
            self.S_ii + other.S_ii,
            self.S_jj + other.S_jj,
            self.S_ji + other.S_ji,
        )

    def cpu(self) -> UpSums:
        sums = (self.z_i, self.z_j, self.S_ii, self.S_jj, self.S_ji)
        return UpSums(self.count, *(value.cpu() for value in sums))

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """`Zc_i^T Zc_i`, `Zc_j^T Zc_j` and `Zc_j^T Zc_i`, all (r, r), of columns less their means."""
        n = self.count
        return (
            self.S_ii - torch.outer(self.z_i, self.z_i) / n,
            self.S_jj - torch.outer(self.z_j, self.z_j) / n,
            self.S_ji - torch.outer(self.z_j, self.z_i) / n,
        )


def add_batch(
    sums: Mapping[str, UpSums], pairs: Pairs, A_i: Mapping[str, Tensor], A_j: Mapping[str, Tensor]
) -> dict[str, UpSums]:
    """The sums of all sites with one more batch."""
    new = {site: UpSums.of(X_i @ A_i[site].T, X_j @ A_j[site].T) for site, (X_i, X_j) in pairs.items()}
    return {site: sums[site] + one if site in sums else one for site, one in new.items()}


def turn(sums: UpSums, ridge: float = 1e-6, tie: float = 0.0) -> tuple[Tensor, Tensor]:
    """`T` (r, r) with `B_j <- B_j T`, and the canonical correlations (r,), float64.

    `T = C_j^{1/2} U V^T C_i^{-1/2}`, `U D V^T` the decomposition of `N = C_j^{-1/2} (Zc_j^T Zc_i) C_i^{-1/2}`, and
    `C = Zc^T Zc + g I` with g = ridge * trace / r.

    tie  `U V^T` is taken of `N + tie I`: where correlations are near zero any rotation fits, and this picks the nearest
         to none
    Afterwards `Pi_i^T B_i = Pi_j^T B_j` , exactly; the correlations do not change. If Z_j = Z_i then T = I.
    Raises DataError for fewer than ten tokens for each rank: correlations of fewer are of the sample alone.
    """
    r = len(sums.z_i)
    if sums.count < 10 * r:
        raise DataError(
            f"aligning at rank {r} needs at least {10 * r} public tokens, there are {sums.count}; give "
            "more public records or a smaller rank"
        )
    C_i, C_j, S_ji = sums.centred()
    (_, inverse_i), (half_j, inverse_j) = (_roots(C, ridge) for C in (C_i, C_j))
    N = inverse_j @ S_ji @ inverse_i
    U, _, Vh = torch.linalg.svd(N + tie * torch.eye(r, dtype=N.dtype))
    return half_j @ U @ Vh @ inverse_i, torch.linalg.svdvals(N)


def _roots(C: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """`(C + g I)^{1/2}` and its inverse, symmetric. Raises DataError where the site never varies."""
    g = ridge * float(C.diagonal().mean())
    if not g > 0:
        raise DataError("a PQ site sees the same input for every public token; give more public records")
    values, vectors = torch.linalg.eigh(C + g * torch.eye(len(C), dtype=C.dtype))
    roots = values.clamp_min(g).sqrt()
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T
