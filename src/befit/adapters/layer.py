"""A linear module with the adapters of all slots beside it.

`SlotLinear` calls the wrapped module and adds to its output, so it works for everything that maps (…, d_in) to
(…, d_out): a plain linear, one with its weight transposed, a quantised one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.keys import Selector
from befit.adapters.lanes import Rows
from befit.core.errors import ModelError
from befit.core.values import State


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in the dtype of x; where weight or bias have lanes, of x (lanes, m, d_in) lane by lane.

    Gradients arrive in the dtype of weight and bias, which lie in float32.
    """
    if weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):
        return F.linear(x, weight, bias)
    y = x @ weight.mT
    return y if bias is None else y + across(bias)


def across(vector: Tensor) -> Tensor:
    """A vector for products with (…, d); with lanes, (lanes, d), for those with (lanes, m, d)."""
    return vector if vector.dim() == 1 else vector.unsqueeze(1)


Recorder = Callable[[str, "Branch", Tensor, Tensor], None]


class Branch(Protocol):
    """What one slot computes beside a layer.

    scale  the multiplier of its output
    drops  whether adapter dropout applies to the input
    lanes  whether it computes with arrays of several clients as well, (lanes, …) each, on x (lanes, m, d_in)
    idle   whether it adds nothing to any input now, so that nothing of it need be computed
    steady whether it does the same operations whatever its arrays hold, so that they can be captured
    """

    scale: float

    drops: ClassVar[bool] = True
    lanes: ClassVar[bool] = True
    steady: ClassVar[bool] = True

    @property
    def idle(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        """(…, d_out) from x (…, d_in), unscaled."""
        ...

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` (1,) or (…, 1) times that, applied where it costs least."""
        ...

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients by factor, from the input (m, t, d_in) and the gradient of the unscaled output."""
        ...


@dataclass
class LoraBranch(Branch):
    """`scale * B A x` (Hu et al. 2021, eq. 3), computed in the dtype of x."""

    A: Tensor  # (rank, d_in)
    B: Tensor  # (d_out, rank)
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.A), self.B)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(weight * linear(x, self.A), self.B)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients from the input x (m, t, d_in) and the gradient of the unscaled output (m, t, d_out).

        `G_A[m] = sum_t (B^T g[m,t]) x[m,t]^T`, `G_B[m] = sum_t g[m,t] (A x[m,t])^T`.
        """
        hidden = F.linear(x, self.A)
        return {"A": torch.einsum("mtr,mti->mri", grad @ self.B, x), "B": torch.einsum("mto,mtr->mor", grad, hidden)}


@dataclass
class DenseBranch(Branch):
    """`weight x + bias`: a dense update of a small module such as a task head."""

    weight: Tensor  # (d_out, d_in)
    bias: Tensor | None  # (d_out,)
    scale: float = 1.0
    drops: ClassVar[bool] = False

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * self(x)

    def gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients, as for `LoraBranch.gradients`."""
        gradients = {"weight": torch.einsum("mto,mti->moi", grad, x)}
        return gradients if self.bias is None else {**gradients, "bias": grad.sum(1)}


@dataclass
class Router:
    """What all layers of one model share: which slots are active, how they are mixed, and the adapter dropout.

    rows  whose the rows of the batch are, where the model holds the adapters of several clients
    folded  by layer, the weight and bias that do what the layer and its active branches do; see `AdaptedModel.scoring`
    native  whether branches compute in the dtype of a layer's input instead of float32
    """

    active: tuple[str, ...] = ()
    mixer: Mixer | None = None
    dropout: float = 0.0
    recorder: Recorder | None = None
    rows: Rows | None = None
    folded: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict[str, tuple[Tensor, Tensor | None]])
    native: bool = False


class SlotLinear(nn.Module):
    """The wrapped module plus the active slots' branches, put together by the router's mixer."""

    def __init__(self, base: nn.Module, name: str, router: Router) -> None:
        super().__init__()
        self.base = base
        self.training = base.training  # a new module would start in training mode, with dropout, in a model that is not
        self.name = name
        self.router = router
        self.branches: dict[str, Branch] = {}
        self.gate: Tensor | None = None  # in the shape of the layout's gate

    def forward(self, x: Tensor) -> Tensor:
        router = self.router
        if (folded := router.folded.get(self.name)) is not None:
            return F.linear(x, *folded)
        y = self.base(x)
        if not router.active or router.mixer is None:
            return y
        inner = x if router.native or x.dtype == torch.float32 else x.float()
        dropped = F.dropout(inner, router.dropout, self.training) if router.dropout and self.training else inner
        if router.rows is None:
            return router.mixer(self, inner, dropped, y)
        lanes = [self._in_stretches(value, router.rows) for value in (inner, dropped, y)]
        return router.mixer(self, *lanes).view(y.shape)

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (d_out, d_in) and bias (d_out,) of one linear map with the module's output and all that the router's
        mixer adds to it, where that weighs all inputs alike; None where nothing is added, the module is no plain linear
        in float32, or what is added is no affine map.

        An affine map is what it does to zero and to each unit vector; vectors of both signs, a small and a large one,
        show whether it is one.
        """
        mixer, base, slots = self.router.mixer, self.base, self.router.active
        busy = any(slot in self.branches and not self.branches[slot].idle for slot in slots)
        if mixer is None or not busy or type(base) is not nn.Linear or base.weight.dtype != torch.float32:
            return None
        units = torch.eye(base.in_features + 1, base.in_features, device=base.weight.device)  # the last row is zero
        signs = torch.linspace(-1, 1, base.in_features, device=units.device) * units.new_tensor([[1.0], [1e3]])
        x = torch.cat([units, signs])
        added = mixer(self, x, x, x.new_zeros(len(x), base.out_features))
        offset, shown = added[-3], added[-2:]
        slope = added[:-3] - offset
        allowed = 1e-3 * shown.abs() + 1e-4 * shown.abs().amax(1, keepdim=True)
        if not bool(((signs @ slope + offset - shown).abs() <= allowed).all()):
            return None
        if base.bias is not None:
            return base.weight + slope.T, base.bias + offset
        return base.weight + slope.T, offset if bool(offset.any()) else None

    def _in_stretches(self, value: Tensor, rows: Rows) -> Tensor:
        """(stretches, m, d) of (rows, …, d), or of several copies of the rows."""
        if len(value) % len(rows.owner):
            raise ModelError(
                f"{self.name} sees an input of shape {tuple(value.shape)} for {len(rows.owner)} examples; several "
                "clients at once need the examples in the first dimension"
            )
        return value.reshape(len(value) // rows.each, -1, value.shape[-1])

    def branch_output(self, slot: str, x: Tensor, dropped: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """The unscaled output of one slot's branch, times `weight` (1,) or (…, 1) if there is one.

        Recorded for per-sample gradients where someone asks for them.
        """
        branch = self.branches.get(slot)
        if branch is None or branch.idle:
            return None
        x = dropped if branch.drops else x
        recorder = self.router.recorder
        if weight is not None:
            return (
                branch.weighted(x, weight) if recorder is None else weight * self._recorded(slot, branch, x, recorder)
            )
        return branch(x) if recorder is None else self._recorded(slot, branch, x, recorder)

    def _recorded(self, slot: str, branch: Branch, x: Tensor, recorder: Recorder) -> Tensor:
        output = branch(x)
        if not output.requires_grad:  # the first adapted layer, whose input has no gradient either
            output.requires_grad_(True)
        inputs = x.detach()
        output.register_hook(lambda grad: recorder(f"{slot}/{self.name}", branch, inputs, grad))
        return output

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base, "bias", None)

    @property
    def in_features(self) -> int:
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return self.base.out_features  # type: ignore[return-value]


Mixer = Callable[[SlotLinear, Tensor, Tensor, Tensor], Tensor]


class Mixed(Protocol):
    """What a mixer that takes part in whole forward passes asks of its model, see `befit.adapters.model`."""

    @property
    def backbone(self) -> nn.Module: ...

    @property
    def active_slots(self) -> tuple[str, ...]: ...

    @property
    def mixer(self) -> Mixer | None: ...

    def leaves(self, chosen: Selector) -> State: ...

    def active(self, *slots: str) -> AbstractContextManager[None]: ...

    def training(self, on: bool) -> AbstractContextManager[None]: ...


def add_up(layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s scale_s h_s`: every active slot at full weight."""
    for slot in layer.router.active:
        output = layer.branch_output(slot, x, dropped)
        if output is not None:
            y = torch.add(y, output.to(y.dtype), alpha=layer.branches[slot].scale)
    return y


def weigh_up(layer: SlotLinear, weights: Sequence[float | Tensor], x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
    """`y + sum_s m_s scale_s h_s`; a weight is a number, or (batch,) with one for each example."""
    for slot, weight in zip(layer.router.active, weights, strict=True):
        output = layer.branch_output(slot, x, dropped)
        if output is None:
            continue
        scale = layer.branches[slot].scale
        if isinstance(weight, Tensor):
            if len(weight) != len(output):
                raise ModelError(
                    f"{layer.name} sees an input of shape {tuple(x.shape)} for {len(weight)} examples; "
                    "weights by example need the examples in the first dimension"
                )
            output = output * weight.to(output.dtype).view(-1, *[1] * (output.dim() - 1))
            y = torch.add(y, output.to(y.dtype), alpha=scale)
        else:
            y = torch.add(y, output.to(y.dtype), alpha=weight * scale)
    return y
