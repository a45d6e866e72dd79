"""How the active slots of a layer become one output. A mixer is `(layer, x, dropped, y) -> y`.

x        (…, d_in) float32 input of the layer; `dropped` is x after the adapters' dropout
y        (…, d_out) output of the frozen module, in the backbone's dtype, which the result keeps
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.layer import SlotLinear

__all__ = ["MIXERS", "add_up", "gated"]


def add_up(layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s scale_s h_s`: every active slot at full weight."""
    for slot in layer.router.active:
        output = layer.branch_output(slot, x, dropped)
        if output is not None:
            y = torch.add(y, output.to(y.dtype), alpha=layer.branches[slot].scale)
    return y


def gated(layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s alpha_s(x) scale_s h_s`, `alpha = softmax(G x)` per token (FedALT, Bian et al. 2025).

    The gate sees the input before dropout; its rows are in the order of the active slots; softmax in float32.
    """
    if layer.gate is None:
        return add_up(layer, x, dropped, y)
    weights = F.linear(x, layer.gate).softmax(-1)  # (…, slots)
    for row, slot in enumerate(layer.router.active):
        output = layer.branch_output(slot, x, dropped)
        if output is not None:
            y = torch.add(y, (weights[..., row : row + 1] * output).to(y.dtype), alpha=layer.branches[slot].scale)
    return y


MIXERS = {"sum": add_up, "gate": gated}
