"""FedL2P's network: from a client's features to a learning rate for every tensor (Lee et al. 2023).

`rate = clamp(W3 relu(W2 relu(W1 f + b1) + b2) + b3; 0, 1000) * eta`, in units of train.lr. It and eta are what FedL2P
federates. Their arrays are a state under the keys `rates/<part>/<factor>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.bayestune import clamp_through
from befit.adapters.layout import ModelShapes
from befit.core.errors import ModelError
from befit.core.seeds import derive_seed
from befit.core.values import TensorSpec

RATES, VALIDATION = "rates", "validation"
ETA = f"{RATES}/eta/value"
_LAYERS = ("first", "second", "third")
_LOW, _HIGH = 0.0, 1e3
_HIDDEN = 100  # the width of both hidden layers
_GAIN = 0.1  # of the Xavier-normal weights; biases start at one, and so, nearly, does every rate


@dataclass(frozen=True)
class RateNet:
    """The network's arrays as part of a layout, and eta's."""

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        """2M -> hidden -> hidden -> O, for M linear modules in the backbone and O tensors of the adapter: A and B of
        every module, and the task head's."""
        dense = [shape for name, shape in shapes.heads.items() if name not in shapes.targets]
        outputs = 2 * len(shapes.targets) + sum(1 + shape.bias for shape in dense)
        if not shapes.linears or not shapes.targets:
            raise ModelError("learning rates are predicted for a model with linear modules and adapters on some")
        widths = (2 * shapes.linears, _HIDDEN, _HIDDEN, outputs)
        specs: dict[str, TensorSpec] = {}
        for name, d_in, d_out in zip(_LAYERS, widths, widths[1:], strict=False):
            specs[f"{RATES}/{name}/W"] = TensorSpec((d_out, d_in))
            specs[f"{RATES}/{name}/b"] = TensorSpec((d_out,))
        return {**specs, ETA: TensorSpec((outputs,))}

    def initial(self, key: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial", key))
        return _GAIN * (2 / sum(shape)) ** 0.5 * torch.randn(shape, generator=generator)


def rate_multiples(state: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """(O,): each tensor's learning rate as a multiple of train.lr, from features (2M,)."""
    hidden = features
    for name in _LAYERS:
        hidden = F.linear(hidden, state[f"{RATES}/{name}/W"], state[f"{RATES}/{name}/b"])
        hidden = hidden if name == _LAYERS[-1] else F.relu(hidden)
    return clamp_through(hidden, _LOW, _HIGH) * state[ETA]
