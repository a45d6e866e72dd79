"""PQ-LoRA (FedMosaic, eq. 5): in some blocks only an r x r core is trained, between frozen orthonormal factors.

    h = W x + s B (P A x + Q)

`A` (r x d_in) has orthonormal rows, `B` (d_out x r) orthonormal columns; both lie in a slot of their own, the basis, so
that all slots with a core use one copy. `P` (r x r) and `Q` (r,) start at zero. `P` is the paper's: released code
multiplies from the other side and stores its transpose. Seo et al. 2026 (FedMosaic), eqs. 5, 8 and 18.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.forms import LORA, Lora, ModuleShape
from befit.adapters.layer import Branch, linear
from befit.core.errors import ModelError
from befit.core.seeds import derive_seed
from befit.core.text import first_of

BASIS = "basis"
_BLOCK = re.compile(r"block\.(\d+)\.(.+)")


def placement(blocks: int, count: int) -> list[int]:
    """Which of `count` transformer blocks, from 0, carry PQ-LoRA (eq. 6): the last of every stretch of
    `count // blocks`, and the last of all.

    Raises ModelError for more blocks than there are.

    >>> placement(4, 28), placement(4, 30), placement(0, 3)
    ([6, 13, 20, 27], [6, 13, 20, 29], [])
    """
    if not 0 <= blocks <= count:
        raise ModelError(f"PQ-LoRA in {blocks} blocks: this model has {count} adapted blocks; take at most that many")
    return [(k + 1) * (count // blocks) - 1 for k in range(blocks - 1)] + [count - 1] * (blocks > 0)


def pq_modules(targets: Iterable[str], blocks: int) -> dict[str, tuple[int, str]]:
    """Target modules that carry PQ-LoRA, each with `(k, projection)`: what it is matched by in other models.

    k counts the blocks of the placement from 0. Counted are the blocks that have target modules.

    >>> pq_modules(["block.00.q_proj", "block.01.q_proj", "block.02.q_proj"], 2)
    {'block.00.q_proj': (0, 'q_proj'), 'block.02.q_proj': (1, 'q_proj')}
    """
    numbered = {name: (int(match[1]), match[2]) for name in targets if (match := _BLOCK.fullmatch(name))}
    numbers = sorted({number for number, _ in numbered.values()})
    order = {numbers[place]: k for k, place in enumerate(placement(blocks, len(numbers)))}
    return {name: (order[number], rest) for name, (number, rest) in numbered.items() if number in order}


def orthonormal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A random matrix with orthonormal rows, or columns where it is taller than wide; float32, from a QR in float64.

    Uniform over all such matrices: the signs of R's diagonal are made positive.
    """
    tall = max(shape), min(shape)
    Q, R = torch.linalg.qr(torch.randn(tall, generator=generator, dtype=torch.float64))
    Q = Q * R.diagonal().sign()
    return (Q if shape == tall else Q.T).float().contiguous()


def polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows (or columns): `U V^T` of `U S V^T` (eq. 21 to 23), in float64."""
    U, _, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (U @ Vh).to(matrix.dtype)


@dataclass
class PQBranch(Branch):
    """`B (P A x + Q)`, computed in the dtype of x."""

    A: Tensor  # (rank, d_in), frozen
    B: Tensor  # (d_out, rank), frozen
    P: Tensor  # (rank, rank)
    Q: Tensor  # (rank,)
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(linear(x, self.A), self.P, self.Q), self.B)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(weight * linear(linear(x, self.A), self.P, self.Q), self.B)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """`G_P[m] = sum_t (B^T g[m,t]) (A x[m,t])^T`, `G_Q[m] = sum_t B^T g[m,t]`; see `LoraBranch.gradients`."""
        inner = grad @ self.B
        return {"P": torch.einsum("mtr,mts->mrs", inner, F.linear(x, self.A)), "Q": inner.sum(1)}


def mixed_cores(cores: Sequence[PQBranch], weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """`B sum_s w_s scale_s (P_s z + Q_s)` with `z = A x`, of cores that share A and B; weights (1,) or (…, 1)."""
    z = linear(x, cores[0].A)
    first, *others = (
        weight * core.scale * linear(z, core.P, core.Q) for core, weight in zip(cores, weights, strict=True)
    )
    return linear(sum(others, start=first), cores[0].B)


@dataclass(frozen=True)
class Basis(Lora):
    """The orthonormal A and B of the PQ modules: never trained, random from the common seed until they are aligned.

    As a slot by itself it computes `B A x`, which is PQ-LoRA with `P = I` and `Q = 0`. Raises ModelError for a rank
    above the width of a module, naming all of them: more orthonormal rows than columns there cannot be.
    """

    blocks: int

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        placed = pq_modules(targets, self.blocks)
        widths = {name: min(targets[name].d_in, targets[name].d_out) for name in placed}
        if narrow := [f"{name} ({width})" for name, width in widths.items() if width < rank]:
            raise ModelError(
                f"PQ-LoRA of rank {rank} needs {rank} orthonormal directions; {len(narrow)} modules are "
                f"narrower: {first_of(narrow, 4)}. Take a rank of at "
                f"most {min(widths.values())}, or other adapter.targets"
            )
        return {
            "A": {name: (rank, targets[name].d_in) for name in placed},
            "B": {name: (targets[name].d_out, rank) for name in placed},
        }

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        rows, columns = shape
        generator = torch.Generator().manual_seed(derive_seed(seed, "orthonormal", module, factor))
        return orthonormal((rows, columns), generator)


@dataclass(frozen=True)
class PQLora:
    """P and Q at the PQ modules, over the basis slot's A and B; plain LoRA at all other modules.

    blocks  how many blocks have PQ modules: those of `placement`
    """

    blocks: int
    basis: ClassVar[str] = BASIS

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        placed = pq_modules(targets, self.blocks)
        plain = {name: shape for name, shape in targets.items() if name not in placed}
        return {
            **LORA.factors(rank, plain),
            "P": {name: (rank, rank) for name in placed},
            "Q": {name: (rank,) for name in placed},
        }

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.zeros(shape) if factor in ("P", "Q") else LORA.initial(module, factor, shape, seed)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        A, B = arrays["A"], arrays["B"]
        return PQBranch(A, B, arrays["P"], arrays["Q"], scale) if "P" in arrays else LORA.branch(arrays, scale)

    def scale(self, scale: float) -> float:
        return scale

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (arrays["B"] @ arrays["P"] if "P" in arrays else arrays["B"]), arrays["A"]

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        """`B Q`: the one part of the update that is no product with the input."""
        return arrays["B"] @ arrays["Q"] if "Q" in arrays and bool(arrays["Q"].any()) else None
