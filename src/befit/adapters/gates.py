"""Gates: weights of two or more slots that a client learns for every adapted layer.

A gate is a mixer (see `befit.adapters.mixers`) with one array for each layer. `h_s` is slot s's scaled output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from befit.adapters.forms import kaiming_uniform
from befit.adapters.layer import SlotLinear, across, add_up, linear
from befit.adapters.pq import PQBranch, mixed_cores


class Gate(ABC):
    """How the slots of a layer are weighed; at a layer without an array of it they are added.

    factor  names the array
    lanes   as a branch has it
    fewer   whether the first few of its slots can be active without the others
    """

    factor: ClassVar[str]
    lanes: ClassVar[bool] = True
    fewer: ClassVar[bool] = False

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        if layer.gate is None:
            return add_up(layer, x, dropped, y)
        return _weigh(layer, self.weights(layer, layer.gate, x), x, dropped, y)

    @abstractmethod
    def shape(self, slots: int, d_in: int) -> tuple[int, ...]: ...

    @abstractmethod
    def weights(self, layer: SlotLinear, array: Tensor, x: Tensor) -> Sequence[Tensor]:
        """One of every active slot, (1,) or (…, 1), from the layer's array and the input (…, d_in) before dropout."""

    def initial(self, module: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.zeros(shape)

    def constants(self, array: Tensor) -> tuple[float, ...] | None:
        """The slots' weights at a layer where they are the same for every input; None where they are not."""
        return None


@dataclass(frozen=True)
class SoftmaxGate(Gate):
    """`y + sum_s alpha_s(x) h_s`, `alpha = softmax(G x)` per token (FedALT, Bian et al. 2025b); G (slots, d_in).

    The gate sees the input before dropout; its rows are in the order of the active slots; softmax in float32.
    """

    factor: ClassVar[str] = "G"

    def shape(self, slots: int, d_in: int) -> tuple[int, ...]:
        return slots, d_in

    def initial(self, module: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return kaiming_uniform(module, self.factor, shape, seed)

    def weights(self, layer: SlotLinear, array: Tensor, x: Tensor) -> Sequence[Tensor]:
        return linear(x.float(), array).softmax(-1).split(1, -1)  # of (…, slots)


@dataclass(frozen=True)
class TopGate(Gate):
    """`y + sum_s w_s(x) h_s` over as many of 2 n - 1 rows as the n active slots have the largest weight in, per token
    (FedLEASE, Wang et al. 2025).

    The first n of the rows stand for the first slot, the others for one of the other slots each, so a token may take
    from one slot, the first, to all n: `p = softmax(G x)` in float32, `w_s` the sum of p over the slot's rows among the
    n largest, divided by the sum of these n. G (2 N - 1, d_in) has rows for N slots; with fewer active ones, n rows
    for the first and those of the other active ones take part.
    """

    factor: ClassVar[str] = "G"
    fewer: ClassVar[bool] = True

    def shape(self, slots: int, d_in: int) -> tuple[int, ...]:
        return 2 * slots - 1, d_in

    def initial(self, module: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return kaiming_uniform(module, self.factor, shape, seed)

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        alone = len(layer.router.active) == 1
        return add_up(layer, x, dropped, y) if alone else super().__call__(layer, x, dropped, y)

    def weights(self, layer: SlotLinear, array: Tensor, x: Tensor) -> Sequence[Tensor]:
        n, most = len(layer.router.active), (array.shape[-2] + 1) // 2
        rows = torch.cat([array[..., :n, :], array[..., most : most + n - 1, :]], -2)
        largest, places = linear(x.float(), rows).softmax(-1).topk(n, -1)  # (…, n) of (…, 2 n - 1)
        largest = largest / largest.sum(-1, keepdim=True)
        weights = largest.new_zeros(*largest.shape[:-1], 2 * n - 1).scatter(-1, places, largest)
        return weights[..., :n].sum(-1, keepdim=True), *weights[..., n:].split(1, -1)


@dataclass(frozen=True)
class ScalarGate(Gate):
    """`y + (1 - b) h_1 + b h_2`, `b = sigmoid(beta)`, one number beta for each layer, 0 at the start (FedMosaic,
    eq. 7). The weights do not depend on the input."""

    factor: ClassVar[str] = "beta"

    def shape(self, slots: int, d_in: int) -> tuple[int, ...]:
        return (_of_two(slots),)

    def weights(self, layer: SlotLinear, array: Tensor, x: Tensor) -> Sequence[Tensor]:
        b = across(array.sigmoid())  # (1,), or (lanes, 1, 1)
        return 1 - b, b

    def constants(self, array: Tensor) -> tuple[float, ...] | None:
        b = float(array.double().sigmoid())
        return 1 - b, b


@dataclass(frozen=True)
class InputGate(Gate):
    """`y + (1 - b_t) h_1 + b_t h_2`, `b_t = sigmoid(<w, x_t> + n_t)`, every token t by itself; w (d_in,), 0 at first

    noise  standard deviation of n_t in training; the released code of FedMosaic has ln 2 (`InputGate.RELEASED`)

    Deviation: the released code (snumprlab/fedmosaic) averages the logits over the sequence, so
    that its gate sees later tokens and padding, and another one while text is generated. This one is causal.
    """

    noise: float = 0.0
    factor: ClassVar[str] = "w"
    RELEASED: ClassVar[float] = math.log(2)  # softplus(0) of a weight that never gets a gradient

    def shape(self, slots: int, d_in: int) -> tuple[int, ...]:
        _of_two(slots)
        return (d_in,)

    def weights(self, layer: SlotLinear, array: Tensor, x: Tensor) -> Sequence[Tensor]:
        logits = (x.float() @ array).unsqueeze(-1) if array.dim() == 1 else x.float() @ array.unsqueeze(-1)  # (…, 1)
        if self.noise and layer.training:
            logits = logits + self.noise * torch.randn_like(logits)
        b = logits.sigmoid()
        return 1 - b, b

    def constants(self, array: Tensor) -> tuple[float, ...] | None:
        return None if bool(array.any()) else (0.5, 0.5)


SOFTMAX = SoftmaxGate()


def make_gate(name: Literal["scalar", "input", "noisy-input"]) -> Gate:
    """A gate of two slots by its name."""
    if name == "scalar":
        return ScalarGate()
    return InputGate(InputGate.RELEASED if name == "noisy-input" else 0.0)


def _weigh(layer: SlotLinear, weights: Sequence[Tensor], x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s weight_s scale_s h_s`; a weight is (1,) or (…, 1). Cores over one basis share its two products."""
    branches = [layer.branches.get(slot) for slot in layer.router.active]
    cores = [branch for branch in branches if isinstance(branch, PQBranch)]
    if len(cores) == len(weights) and layer.router.recorder is None:
        return y + mixed_cores(cores, weights, dropped).to(y.dtype)
    for slot, weight in zip(layer.router.active, weights, strict=True):
        output = layer.branch_output(slot, x, dropped, weight)
        if output is not None:
            y = torch.add(y, output.to(y.dtype), alpha=layer.branches[slot].scale)
    return y


def _of_two(slots: int) -> int:
    if slots != 2:
        raise ValueError(f"this gate weighs two slots, got {slots}")
    return 1
