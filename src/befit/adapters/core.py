"""Small trained cores between frozen factors (Fed-SB, Singhal et al. 2025b; Ravan, Raje et al. 2025).

    h = W x + s sum_i c_i B_i R_i A_i x

The factors of all heads lie one after the other in `A` (heads r x d_in) and `B` (d_out x heads r); `R` (heads r x r)
has the cores, and `c` (heads,) their weights, which one head alone does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.forms import ModuleShape
from befit.adapters.layer import Branch, linear
from befit.adapters.pq import orthonormal
from befit.core.errors import ModelError
from befit.core.seeds import derive_seed


@dataclass(frozen=True)
class Cores:
    """`heads` cores of the slot's rank. A has orthonormal rows and B orthonormal columns, across all heads, drawn from
    the common seed; R starts at zero and c at one, so that a fresh adapter changes nothing.

    Raises ModelError where the heads together have more ranks than a module has inputs or outputs.
    """

    heads: int = 1
    basis: ClassVar[str] = ""

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        width = rank * self.heads
        narrow = {name: least for name, shape in targets.items() if (least := min(shape.d_in, shape.d_out)) < width}
        if narrow:
            name = min(narrow, key=narrow.__getitem__)
            raise ModelError(
                f"{self.heads} x rank {rank} needs {width} orthonormal directions, and {name} has {narrow[name]}; "
                "take a smaller rank or other adapter.targets, or fewer heads where a method has them"
            )
        shapes = {
            "A": {name: (width, shape.d_in) for name, shape in targets.items()},
            "B": {name: (shape.d_out, width) for name, shape in targets.items()},
            "R": {name: (width, rank) for name in targets},
        }
        return shapes if self.heads == 1 else {**shapes, "c": {name: (self.heads,) for name in targets}}

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if factor in ("R", "c"):
            return torch.full(shape, float(factor == "c"))
        rows, columns = shape
        generator = torch.Generator().manual_seed(derive_seed(seed, "orthonormal", module, factor))
        return orthonormal((rows, columns), generator)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return CoreBranch(arrays["A"], arrays["B"], arrays["R"], arrays.get("c"), scale)

    def scale(self, scale: float) -> float:
        return scale

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return arrays["B"] @ blocks(arrays["R"], arrays.get("c")), arrays["A"]

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return None


def blocks(R: Tensor, c: Tensor | None) -> Tensor:
    """(…, h r, h r), the cores of R (…, h r, r) along the diagonal, each times its weight of c (…, h)."""
    width, rank = R.shape[-2:]
    if c is None:
        return R
    heads = torch.arange(width, device=R.device) // rank  # the head of each row, and of each column
    weighed = R * c[..., heads].unsqueeze(-1)
    return torch.where(heads[:, None] == heads, weighed.repeat(*(1,) * (R.dim() - 1), width // rank), 0.0)


@dataclass
class CoreBranch(Branch):
    """`B blocks(R, c) A x`, computed in the dtype of x."""

    A: Tensor  # (heads rank, d_in), frozen
    B: Tensor  # (d_out, heads rank), frozen
    R: Tensor  # (heads rank, rank)
    c: Tensor | None  # (heads,)
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(linear(x, self.A), blocks(self.R, self.c)), self.B)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(weight * linear(linear(x, self.A), blocks(self.R, self.c)), self.B)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """With the output's gradient g and `z = A x`, head by head: `G_R[m] = c sum_t (B^T g[m,t]) z[m,t]^T` and
        `G_c[m] = sum_t (B^T g[m,t])^T R z[m,t]`; see `LoraBranch.gradients`."""
        heads = 1 if self.c is None else len(self.c)
        inner = (grad @ self.B).unflatten(-1, (heads, -1))  # (m, t, h, r)
        z = F.linear(x, self.A).unflatten(-1, (heads, -1))
        outer = torch.einsum("mths,mthr->mhsr", inner, z)
        if self.c is None:
            return {"R": outer.flatten(1, 2)}
        cores = self.R.unflatten(0, (heads, -1))  # (h, r, r)
        return {"R": (self.c[:, None, None] * outer).flatten(1, 2), "c": (outer * cores).sum((2, 3))}
