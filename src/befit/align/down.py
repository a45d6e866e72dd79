"""A by L2: the other model's down-projection made to see what the pivot's sees (FedMosaic, eq. 20 to 23).

Specification fedmosaic.md, section 3.2. X_i (n, d_i) and X_j (n, d_j) are inputs of one site for n matched tokens; A_i
(r, d_i) is the pivot's and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from befit.adapters.pq import polar
from befit.align.features import Pairs

__all__ = ["DownSums", "closed_form", "project", "regulariser", "site_losses", "train_down"]


def regulariser(A: Tensor) -> Tensor:
    """`||A A^T - I_r||_F^2 / (r (r - 1))`: how far the rows (r, d) are from orthonormal.

    Deviation: the paper prints `A^T A`, a d x d matrix of rank r < d, which never is the identity.
    """
    r = len(A)
    return (A @ A.T - torch.eye(r, device=A.device, dtype=A.dtype)).square().sum() / max(1, r * (r - 1))


def site_losses(pairs: Pairs, pivot: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By site: the mean over tokens and ranks of `(X_i A_i^T - X_j A_j^T)^2`."""
    return {site: (X_i @ pivot[site].T - X_j @ other[site].T).square().mean() for site, (X_i, X_j) in pairs.items()}


def train_down(
    batches: Iterable[Pairs], steps: int, pivot: Mapping[str, Tensor], start: Mapping[str, Tensor], *,
    lr: float, weight: float,
) -> dict[str, Tensor]:  # fmt: skip
    """A_j of all sites by AdamW on `sum_sites L2 + weight * mean_sites regulariser`, before any projection.

    Cosine schedule to zero over `steps` batches after a linear warm-up of a tenth; no weight decay.
    """
    other = {site: A.detach().clone().requires_grad_(True) for site, A in start.items()}
    optimiser = torch.optim.AdamW(list(other.values()), lr=lr, weight_decay=0.0)
    warm = max(1, math.ceil(0.1 * steps))
    for step, pairs in enumerate(batches):
        share = (
            (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
        )
        for group in optimiser.param_groups:
            group["lr"] = lr * share
        loss = torch.stack(list(site_losses(pairs, pivot, other).values())).sum()
        loss = loss + weight * torch.stack([regulariser(A) for A in other.values()]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {site: A.detach() for site, A in other.items()}


@dataclass
class DownSums:
    """`C_jj = sum X_j^T X_j` (d_j, d_j) and `C_ji = sum X_j^T Z_i` (d_j, r), `Z_i = X_i A_i^T`, of some sites."""

    C_jj: dict[str, Tensor] = field(default_factory=dict)
    C_ji: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pairs: Pairs, pivot: Mapping[str, Tensor]) -> None:
        for site, (X_i, X_j) in pairs.items():
            own, common = X_j.T @ X_j, X_j.T @ (X_i @ pivot[site].T)
            self.C_jj[site] = self.C_jj[site] + own if site in self.C_jj else own
            self.C_ji[site] = self.C_ji[site] + common if site in self.C_ji else common


def closed_form(C_jj: Tensor, C_ji: Tensor, ridge: float = 1e-6) -> Tensor:
    """The minimiser of `||Z_i - X_j A_j^T||^2` with a ridge, (r, d_j), before projection, in float64.

    `A_j = ((C_jj + gamma I)^-1 C_ji)^T`, gamma = ridge * trace(C_jj) / d_j.
    """
    C = C_jj.double()
    gamma = ridge * C.diagonal().mean()
    factor = torch.linalg.cholesky(C + gamma * torch.eye(len(C), dtype=C.dtype, device=C.device))
    return torch.cholesky_solve(C_ji.double(), factor).T


def project(unprojected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The nearest matrices with orthonormal rows, float32."""
    return {site: polar(A.double()).float() for site, A in unprojected.items()}
