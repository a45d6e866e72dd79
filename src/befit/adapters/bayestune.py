"""BayesTune-LoRA (Lee et al. 2025a, FedP2EFT): `y = W x + b + s B (lambda * (A x))`.

Two slots share one A and B. `Scales` holds one learnt number per rank and computes with it clamped from below, at full
rank: what is trained to find out which ranks matter. `Budgeted` holds A, B and the scales that a budget kept, zero for
those it dropped: only kept ranks are computed with, and a module without any is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.forms import LORA, ModuleShape
from befit.adapters.layer import Branch, across, linear
from befit.core.seeds import derive_seed

SCALES, BUDGETED = "search", "budgeted"
LOW, HIGH = 1e-4, 1e3


@dataclass
class ScaledBranch(Branch):
    """`B (lambda * A x)` at full rank, with lambda clamped to [low, high] by a straight-through estimator."""

    A: Tensor  # (rank, d_in)
    B: Tensor  # (d_out, rank)
    scales: Tensor  # (rank,), as the optimiser has them
    scale: float
    clamped: bool = True

    def used(self) -> Tensor:
        return clamp_through(self.scales, LOW, HIGH) if self.clamped else self.scales

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.A) * across(self.used()), self.B)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(weight * linear(x, self.A) * across(self.used()), self.B)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients of A, B and lambda; see `LoraBranch.gradients`."""
        return _gradients(x, grad, self.A, self.B, self.used())


@dataclass
class BudgetedBranch(Branch):
    """`B[:, kept] (lambda[kept] * A[kept] x)`: the ranks whose lambda is not zero."""

    A: Tensor  # (rank, d_in)
    B: Tensor  # (d_out, rank)
    scales: Tensor  # (rank,), zero for a rank that the budget dropped
    scale: float
    steady: ClassVar[bool] = False
    _kept: Tensor | None = field(default=None, repr=False)
    _version: int = -1

    @property
    def kept(self) -> Tensor:
        """Indices of the kept ranks. Looked up again when the scales were written to, since loading does that."""
        if self._kept is None or self._version != self.scales._version:
            self._kept = self.scales.detach().nonzero().flatten()
            self._version = self.scales._version
        return self._kept

    @property
    def idle(self) -> bool:
        return self.scales.dim() == 1 and not len(self.kept)

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        # Lanes may keep different ranks: all are computed with, dropped ones at scale zero. Scales that nobody trains
        # are held once where all lanes have the same, whatever the factors are.
        if self.scales.dim() > 1 or self.A.dim() > 2 or self.B.dim() > 2:
            return self.A, self.B, self.scales
        kept = self.kept
        if len(kept) == len(self.scales):
            return self.A, self.B, self.scales
        return self.A[kept], self.B[:, kept], self.scales[kept]

    def __call__(self, x: Tensor) -> Tensor:
        A, B, scales = self._factors()
        return linear(linear(x, A) * across(scales), B)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        A, B, scales = self._factors()
        return linear(weight * linear(x, A) * across(scales), B)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients of A and B, zero at dropped ranks; see `LoraBranch.gradients`."""
        gradients = _gradients(x, grad, self.A, self.B, self.scales)
        return {**gradients, "B": gradients["B"] * (self.scales != 0), "lambda": torch.zeros_like(gradients["lambda"])}


def _gradients(x: Tensor, grad: Tensor, A: Tensor, B: Tensor, scales: Tensor) -> dict[str, Tensor]:
    hidden, inner = F.linear(x, A), grad @ B
    return {
        "A": torch.einsum("mtr,mti->mri", inner * scales, x),
        "B": torch.einsum("mto,mtr->mor", grad, hidden * scales),
        "lambda": (inner * hidden).sum(1),
    }


@dataclass(frozen=True)
class Budgeted:
    """A, B as in LoRA, and kept scales `lambda` that nobody trains: zero at first, an adapter without ranks."""

    basis: ClassVar[str] = ""

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {**LORA.factors(rank, targets), "lambda": dict.fromkeys(targets, (rank,))}

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.zeros(shape) if factor == "lambda" else LORA.initial(module, factor, shape, seed)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return BudgetedBranch(arrays["A"], arrays["B"], arrays["lambda"], scale)

    def scale(self, scale: float) -> float:
        return scale

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the kept ranks, with lambda folded into B; both factors are empty where there are none."""
        kept = arrays["lambda"].nonzero().flatten()
        return arrays["B"][:, kept] * arrays["lambda"][kept], arrays["A"][kept]

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Scales:
    """One scale per rank over A and B of the slot `BUDGETED`, to be learnt.

    start    their value before anything is known
    clamped  whether the forward pass uses them clamped; the released code clamps in the penalties alone
    """

    start: float = LOW
    clamped: bool = True
    basis: ClassVar[str] = BUDGETED

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {"lambda": dict.fromkeys(targets, (rank,))}

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.full(shape, self.start)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return ScaledBranch(arrays["A"], arrays["B"], arrays["lambda"], scale, self.clamped)

    def scale(self, scale: float) -> float:
        return scale

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        used = arrays["lambda"].clamp(LOW, HIGH) if self.clamped else arrays["lambda"]
        return arrays["B"] * used, arrays["A"]

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return None


class _ClampThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def clamp_through(value: Tensor, low: float, high: float) -> Tensor:
    """`min(max(value, low), high)` with the gradient of the identity, outside the bounds too (Lee et al. 2025a, eq. 6).

    A straight-through estimator: an entry that is clamped still learns which way to go.

    >>> v = torch.tensor([-1.0, 0.5], requires_grad=True)
    >>> clamp_through(v, 0.0, 1.0).sum().backward()
    >>> v.grad
    tensor([1., 1.])
    """
    return _ClampThrough.apply(value, low, high)  # type: ignore[return-value]


@dataclass(frozen=True)
class Svd(Budgeted):
    """AdaLoRA's adapter (Zhang et al. 2023, eq. 3): `delta = s P diag(lambda) Q`, in the shape of a singular value
    decomposition. `B` holds P, `A` holds Q, and `lambda` the singular values, which are trained.

    `A` and `B` start normal with deviation `spread`, singular values at zero: a fresh adapter changes nothing. A rank
    that an allocation took away has the value zero, as in a budgeted adapter, whose checkpoints this form shares.
    All ranks are computed with in training, also those at zero, since each may come back until the last allocation.
    """

    spread: float = 0.02

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if factor == "lambda":
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial", module, factor))
        return self.spread * torch.randn(shape, generator=generator)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        return ScaledBranch(arrays["A"], arrays["B"], arrays["lambda"], scale, clamped=False)
