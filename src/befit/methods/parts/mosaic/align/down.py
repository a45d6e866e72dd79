"""A by L2: the other model's down-projection made to see what the pivot's sees (Seo et al. 2026, eqs. 20 to 23).

X_i (n, d_i) and X_j (n, d_j) are inputs of one site for n matched tokens; A_i (r, d_i) is the pivot's and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from befit.adapters.pq import polar
from befit.methods.parts.mosaic.align.features import Pairs
from befit.methods.parts.mosaic.align.up import UpSums

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
    batches: Iterable[Pairs],
    steps: int,
    pivot: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    *,
    lr: float,
    weight: float,
) -> dict[str, Tensor]:
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
    """All that the closed form of A, the turn of B and their distances need of the tokens, as sums in float64.

    tokens  how many
    C_jj    by site, `sum X_j^T X_j` (d_j, d_j): one matrix for sites that read the same
    C_ji    `sum X_j^T Z_i` (d_j, r), with `Z_i = X_i A_i^T`
    S_ii    `sum Z_i^T Z_i` (r, r)
    z_i     `sum Z_i` (r,)
    x_j     `sum X_j` (d_j,)
    """

    tokens: int = 0
    C_jj: dict[str, Tensor] = field(default_factory=dict)
    C_ji: dict[str, Tensor] = field(default_factory=dict)
    S_ii: dict[str, Tensor] = field(default_factory=dict)
    z_i: dict[str, Tensor] = field(default_factory=dict)
    x_j: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pairs: Pairs, pivot: Mapping[str, Tensor]) -> None:
        """One more batch."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor that several sites may share
        for site, (X_i, X_j) in pairs.items():
            if id(X_j) not in done:
                wide = X_j.double()
                done[id(X_j)] = wide, _plus(self.C_jj.get(site), wide.T @ wide)
            wide, self.C_jj[site] = done[id(X_j)]
            Z_i = (X_i @ pivot[site].T).double()
            self.C_ji[site] = _plus(self.C_ji.get(site), wide.T @ Z_i)
            self.S_ii[site] = _plus(self.S_ii.get(site), Z_i.T @ Z_i)
            self.z_i[site] = _plus(self.z_i.get(site), Z_i.sum(0))
            self.x_j[site] = _plus(self.x_j.get(site), wide.sum(0))
        self.tokens += len(next(iter(pairs.values()))[0])

    def loss(self, site: str, A: Tensor) -> float:
        """The mean over tokens and ranks of `(Z_i - X_j A^T)^2`, of any A (r, d_j)."""
        A = A.double()
        squares = self.S_ii[site].trace() - 2 * (A.T * self.C_ji[site]).sum() + (A @ self.C_jj[site] * A).sum()
        return max(0.0, float(squares)) / max(1, self.tokens * len(A))

    def up(self, site: str, A: Tensor) -> UpSums:
        """The sums of `Z_i` and `Z_j = X_j A^T`."""
        A = A.double()
        return UpSums(
            self.tokens,
            self.z_i[site],
            A @ self.x_j[site],
            self.S_ii[site],
            A @ self.C_jj[site] @ A.T,
            A @ self.C_ji[site],
        )


def _plus(held: Tensor | None, more: Tensor) -> Tensor:
    return more if held is None else held + more


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
