"""AdaLoRA's adapter (Zhang et al. 2023, eq. 3): `delta = s P diag(lambda) Q`, in the shape of a singular value
decomposition.

`B` holds P, `A` holds Q, and `lambda` the singular values, which are trained. A rank that an allocation took away has
the value zero there, as in a budgeted adapter, whose storage and checkpoints this form therefore shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.adapters.bayestune import Budgeted, ScaledBranch
from befit.adapters.layer import Branch
from befit.core.seeds import derive_seed

__all__ = ["Svd"]


@dataclass(frozen=True)
class Svd(Budgeted):
    """`A` and `B` normal with deviation `spread`, singular values zero: a fresh adapter changes nothing.

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
