"""The factors of another model, aligned to the pivot's: first A, by L2, then B, by canonical correlations.

A (Seo et al. 2026, eqs. 20 to 23): X_i (n, d_i) and X_j (n, d_j) are inputs of one PQ module for n matched tokens; the
pivot's A_i (r, d_i) stays, and A_j is made to give the same `Z = X A^T`.

B (eq. 19): turned so that cores mean the same in both models. Everything happens in the r dimensions of Z: with
orthonormal B_i and B_j this is exactly the recipe on outputs `H = Z B^T` of full width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from befit.adapters.pq import polar
from befit.core.errors import DataError
from befit.methods.parts.mosaic.align.features import Pairs


def regulariser(A: Tensor) -> Tensor:
    """`||A A^T - I_r||_F^2 / (r (r - 1))`: how far the rows (r, d) are from orthonormal.

    Deviation: the paper prints `A^T A`, a d x d matrix of rank r < d, which never is the identity.
    """
    r = len(A)
    return (A @ A.T - torch.eye(r, device=A.device, dtype=A.dtype)).square().sum() / max(1, r * (r - 1))


def losses_by_place(pairs: Pairs, pivot: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By place of a PQ module: the mean over tokens and ranks of `(X_i A_i^T - X_j A_j^T)^2`."""
    return {place: (X_i @ pivot[place].T - X_j @ other[place].T).square().mean() for place, (X_i, X_j) in pairs.items()}


def train_down(
    batches: Iterable[Pairs],
    steps: int,
    pivot: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    *,
    lr: float,
    weight: float,
) -> dict[str, Tensor]:
    """A_j of all PQ modules by AdamW on `sum L2 + weight * mean regulariser` over them, before any projection.

    Cosine schedule to zero over `steps` batches after a linear warm-up of a tenth; no weight decay.
    """
    other = {place: A.detach().clone().requires_grad_(True) for place, A in start.items()}
    optimiser = torch.optim.AdamW(list(other.values()), lr=lr, weight_decay=0.0)
    warm = max(1, math.ceil(0.1 * steps))
    for step, pairs in enumerate(batches):
        share = (
            (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
        )
        for group in optimiser.param_groups:
            group["lr"] = lr * share
        loss = torch.stack(list(losses_by_place(pairs, pivot, other).values())).sum()
        loss = loss + weight * torch.stack([regulariser(A) for A in other.values()]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {place: A.detach() for place, A in other.items()}


@dataclass
class DownSums:
    """All that the closed form of A, the turn of B and their distances need of the tokens, as sums in float64.

    dtype   of the products of a batch of wide inputs, before they are added up. A GPU takes float32: many have one unit
            for float64 to 64 for float32, and C_jj would take longer than both models' forward passes
    tokens  how many
    C_jj    by place, `sum X_j^T X_j` (d_j, d_j): one matrix for modules that read the same
    C_ji    `sum X_j^T Z_i` (d_j, r), with `Z_i = X_i A_i^T`
    S_ii    `sum Z_i^T Z_i` (r, r)
    z_i     `sum Z_i` (r,)
    x_j     `sum X_j` (d_j,)
    """

    dtype: torch.dtype = torch.float64
    tokens: int = 0
    C_jj: dict[str, Tensor] = field(default_factory=dict)
    C_ji: dict[str, Tensor] = field(default_factory=dict)
    S_ii: dict[str, Tensor] = field(default_factory=dict)
    z_i: dict[str, Tensor] = field(default_factory=dict)
    x_j: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pairs: Pairs, pivot: Mapping[str, Tensor]) -> None:
        """One more batch."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor that several modules may share
        for place, (X_i, X_j) in pairs.items():
            if id(X_j) not in done:
                wide = X_j.to(self.dtype)
                done[id(X_j)] = wide, _plus(self.C_jj.get(place), (wide.T @ wide).double())
            wide, self.C_jj[place] = done[id(X_j)]
            Z_i = (X_i @ pivot[place].T).double()
            self.C_ji[place] = _plus(self.C_ji.get(place), (wide.T @ Z_i.to(self.dtype)).double())
            self.S_ii[place] = _plus(self.S_ii.get(place), Z_i.T @ Z_i)
            self.z_i[place] = _plus(self.z_i.get(place), Z_i.sum(0))
            self.x_j[place] = _plus(self.x_j.get(place), wide.sum(0, dtype=torch.float64))
        self.tokens += len(next(iter(pairs.values()))[0])

    @property
    def precision(self) -> float:
        """The relative error of a product."""
        return torch.finfo(self.dtype).eps

    def loss(self, place: str, A: Tensor) -> float:
        """The mean over tokens and ranks of `(Z_i - X_j A^T)^2`, of any A (r, d_j)."""
        A = A.double()
        squares = self.S_ii[place].trace() - 2 * (A.T * self.C_ji[place]).sum() + (A @ self.C_jj[place] * A).sum()
        return max(0.0, float(squares)) / max(1, self.tokens * len(A))

    def up(self, place: str, A: Tensor) -> UpSums:
        """The sums of `Z_i` and `Z_j = X_j A^T`."""
        A = A.double()
        return UpSums(
            self.tokens,
            self.z_i[place],
            A @ self.x_j[place],
            self.S_ii[place],
            A @ self.C_jj[place] @ A.T,
            A @ self.C_ji[place],
        )


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def closed_form(C_jj: Tensor, C_ji: Tensor, ridge: float = 1e-6, precision: float = 0.0) -> Tensor:
    """The minimiser of `||Z_i - X_j A_j^T||^2` with a ridge, (r, d_j), before projection, in float64.

    `A_j = ((C_jj + gamma I)^-1 C_ji)^T`, gamma = ridge * trace(C_jj) / d_j.

    precision  relative error of the entries of C_jj. At every input gamma is at least sqrt(d_j) times that of the
               input's own power, since eigenvalues below it are not known, and may be negative
    """
    C = C_jj.double()
    power = C.diagonal()
    gamma = torch.maximum(ridge * power.mean(), precision * math.sqrt(len(C)) * power)
    factor = torch.linalg.cholesky(C + torch.diag(gamma))
    return torch.cholesky_solve(C_ji.double(), factor).T


def project(unprojected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The nearest matrices with orthonormal rows, float32."""
    return {place: polar(A.double()).float() for place, A in unprojected.items()}


@dataclass
class UpSums:
    """Streamed sums of one PQ module, float64: tokens, `sum z` (r,), `sum z z^T` (r, r) of pivot (i) and other (j)."""

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
        return UpSums(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

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
    """The sums of all PQ modules with one more batch."""
    new = {place: UpSums.of(X_i @ A_i[place].T, X_j @ A_j[place].T) for place, (X_i, X_j) in pairs.items()}
    return {place: sums[place] + more if place in sums else more for place, more in new.items()}


def turn(sums: UpSums, ridge: float = 1e-6, tie: float = 0.0) -> tuple[Tensor, Tensor]:
    """`T` (r, r) with `B_j <- B_j T`, and the canonical correlations (r,), float64.

    `T = C_j^{1/2} U V^T C_i^{-1/2}`, `U D V^T` the decomposition of `N = C_j^{-1/2} (Zc_j^T Zc_i) C_i^{-1/2}`, and
    `C = Zc^T Zc + g I` with g = ridge * trace / r.

    tie  `U V^T` is taken of `N + tie I`: where correlations are near zero any rotation fits, and this picks the nearest
         to none
    Afterwards `Pi_i^T B_i = Pi_j^T B_j`, exactly; the correlations do not change. If Z_j = Z_i then T = I.
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
    """`(C + g I)^{1/2}` and its inverse, symmetric. Raises DataError where what a module reads never varies."""
    g = ridge * float(C.diagonal().mean())
    if not g > 0:
        raise DataError("a PQ module sees the same input for every public token; give more public records")
    values, vectors = torch.linalg.eigh(C + g * torch.eye(len(C), dtype=C.dtype))
    roots = values.clamp_min(g).sqrt()
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T
