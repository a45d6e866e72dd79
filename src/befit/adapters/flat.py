"""Adapters of one model in one contiguous buffer, so that loading, saving and stepping are single operations.

The tensors a layer computes with are views of the buffer, and their gradients views of a second one. An optimiser
then steps over whole runs of keys instead of one small matrix after another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from befit.adapters.keys import Selector
from befit.adapters.state import cut
from befit.core.errors import PayloadMismatch
from befit.core.values import State, TensorSpec


class FlatState:
    """Values and gradients of the keys in `specs`, float32, in that order, on one device."""

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for key, spec in specs.items():
            start, end = end, end + int(torch.Size(spec.shape).numel())
            self._spans[key] = (start, end)
        self._shapes = {key: tuple(spec.shape) for key, spec in specs.items()}
        self._values = torch.zeros(end, device=device)
        self._gradients = torch.zeros(end, device=device)
        self.leaves: dict[str, Tensor] = {}
        for key, (start, stop) in self._spans.items():
            shape = self._shapes[key]
            leaf = self._values[start:stop].view(shape).detach()
            leaf.requires_grad_(False)
            leaf.grad = self._gradients[start:stop].view(shape)
            self.leaves[key] = leaf
        self._runs: dict[str, list[tuple[int, int, list[str]]]] = {}
        self._parameters: dict[str, list[nn.Parameter]] = {}

    def fill(self, values: Tensor) -> None:
        """Overwrite everything with a flat copy made by `snapshot`."""
        self._values.copy_(values)

    def snapshot(self) -> Tensor:
        return self._values.clone()

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the given keys in; the others stay. Raises PayloadMismatch for an unknown key or another shape."""
        leaves: list[Tensor] = []
        for key, tensor in state.items():
            leaf = self.leaves.get(key)
            if leaf is None:
                raise PayloadMismatch(f"{key!r} is not among the {len(self.leaves)} arrays of this model")
            if leaf.shape != tensor.shape:
                raise PayloadMismatch(f"{key}: shape {tuple(tensor.shape)}, the model has {tuple(leaf.shape)}")
            leaves.append(leaf)
        if leaves:
            torch._foreach_copy_(leaves, [*state.values()])

    def dump(self, chosen: Selector) -> State:
        """A copy of the chosen keys on the CPU. Keys that lie side by side share one allocation."""
        state: State = {}
        for start, stop, keys in self._find_runs(chosen):
            copied = self._values[start:stop].to("cpu", copy=True)
            state |= cut(copied, {key: self._shapes[key] for key in keys})
        return state

    def parameters(self, chosen: Selector) -> list[nn.Parameter]:
        """The chosen keys as few long parameters whose gradients are filled by backward passes through the leaves."""
        if chosen.text not in self._parameters:
            parameters = []
            for start, stop, _ in self._find_runs(chosen):
                parameter = nn.Parameter(self._values[start:stop].detach())
                parameter.grad = self._gradients[start:stop]
                parameters.append(parameter)
            self._parameters[chosen.text] = parameters
        for parameter, (start, stop, _) in zip(self._parameters[chosen.text], self._find_runs(chosen), strict=True):
            parameter.grad = self._gradients[start:stop]  # an optimiser's zero_grad may have taken it away
        return self._parameters[chosen.text]

    def sizes(self, chosen: Selector) -> list[list[int]]:
        """How many entries each key of each of those parameters has."""
        return [[self.leaves[key].numel() for key in keys] for _, _, keys in self._find_runs(chosen)]

    def zero_gradients(self) -> None:
        self._gradients.zero_()

    def require_gradients(self, chosen: Selector, required: bool) -> None:
        for _, _, keys in self._find_runs(chosen):
            for key in keys:
                self.leaves[key].requires_grad_(required)

    def _find_runs(self, chosen: Selector) -> list[tuple[int, int, list[str]]]:
        """Maximal stretches of the buffer whose keys are all chosen, and these keys."""
        if chosen.text not in self._runs:
            runs: list[tuple[int, int, list[str]]] = []
            for key, (start, stop) in self._spans.items():
                if not chosen(key):
                    continue
                if runs and runs[-1][1] == start:
                    before, _, keys = runs[-1]
                    keys.append(key)
                    runs[-1] = (before, stop, keys)
                else:
                    runs.append((start, stop, [key]))
            self._runs[chosen.text] = runs
        return self._runs[chosen.text]
