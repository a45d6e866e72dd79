"""The personalisation-strategy generator (Lee et al. 2025a, eq. 6): from a client's features to the scale of each rank.

A small network `lambda = clamp(W2 prelu(W1 f + b1) + b2)`, the only thing that FedP2EFT federates. Its arrays are a
state under the keys `generator/<part>/<factor>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.bayestune import HIGH, LOW, clamp_through
from befit.adapters.layout import ModelShapes
from befit.core.errors import ModelError
from befit.core.schema import POSITIVE, check_fields
from befit.core.seeds import derive_seed
from befit.core.values import State, TensorSpec

GENERATOR = "generator"
_W1, _B1, _SLOPE, _W2, _B2 = (
    f"{GENERATOR}/{name}" for name in ("first/W", "first/b", "activation/slope", "second/W", "second/b")
)


@dataclass(frozen=True)
class Generator:
    """The generator's arrays as part of a layout.

    rank   r_init, outputs for each of the L target modules
    gain   of the Xavier-normal weights
    bias   of both layers at the start: about what a new generator says of every rank
    """

    rank: int
    gain: float = 1e-6
    bias: float = 1e-4

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        """2M -> 4M -> L * rank, for M linear modules in the backbone."""
        M, outputs = shapes.linears, len(shapes.targets) * self.rank
        if not M or not outputs:
            raise ModelError("the generator needs a model with linear modules and adapters on some of them")
        return {
            _W1: TensorSpec((4 * M, 2 * M)),
            _B1: TensorSpec((4 * M,)),
            _SLOPE: TensorSpec((1,)),
            _W2: TensorSpec((outputs, 4 * M)),
            _B2: TensorSpec((outputs,)),
        }

    def initial(self, key: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if key == _SLOPE:
            return torch.full(shape, 0.25)
        if len(shape) == 1:
            return torch.full(shape, self.bias)
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial", key))
        deviation = self.gain * (2 / sum(shape)) ** 0.5
        return deviation * torch.randn(shape, generator=generator)


def generate(state: Mapping[str, Tensor], features: Tensor, precision: torch.dtype = torch.float32) -> Tensor:
    """The scales (L * rank,) that the generator gives for features (2M,); clamped to [1e-4, 1000], straight through.

    precision  dtype of weights, features and products; the scales come back in float32
    """
    state, features = {key: value.to(precision) for key, value in state.items()}, features.to(precision)
    hidden = F.prelu(F.linear(features, state[_W1], state[_B1]), state[_SLOPE])
    return clamp_through(F.linear(hidden, state[_W2], state[_B2]).float(), LOW, HIGH)


@dataclass(frozen=True)
class GeneratorTraining:
    """How a client trains the generator in a round: FedP2EFT's block `generator`.

    lr     Adam's rate
    steps  steps of a round
    """

    lr: Annotated[float, POSITIVE] = 1e-4
    steps: Annotated[int, POSITIVE] = 10

    def __post_init__(self) -> None:
        check_fields(self, "the generator")


def fit(
    state: Mapping[str, Tensor],
    features: Tensor,
    target: Tensor,
    steps: int,
    lr: float,
    precision: torch.dtype = torch.float32,
) -> tuple[State, list[float]]:
    """`steps` of Adam on `sum |generate(f) - target|`, from `state` (Lee et al. 2025a, Figure 2).

    precision  dtype of weights, features, and all that the optimiser knows
    ->    the new state in float32, and the L1 gap before every step and at the end. `state` is not written to.
    """
    trained = {key: value.detach().to(precision, copy=True).requires_grad_(True) for key, value in state.items()}
    optimiser = torch.optim.Adam(trained.values(), lr=lr, foreach=False)
    gaps = []
    for _ in range(steps):
        gap = (generate(trained, features, precision) - target).abs().sum()
        optimiser.zero_grad()
        gap.backward()
        optimiser.step()
        gaps.append(float(gap.detach()))
    with torch.no_grad():
        gaps.append(float((generate(trained, features, precision) - target).abs().sum()))
    return {key: value.detach().float() for key, value in trained.items()}, gaps
