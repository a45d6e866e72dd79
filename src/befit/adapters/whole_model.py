"""A slot that changes every weight of the backbone: full fine-tuning, kept as a difference as everything else is.

While such a slot is active each module computes with `W + D`, put in its place for the length of its own forward pass
and taken out again after it. The backbone's tensors are never written to, so one backbone still serves all clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from befit.adapters.forms import ModuleShape
from befit.adapters.keys import Selector, split
from befit.adapters.layer import Branch, Router
from befit.core.errors import ModelError

# What architectures call the weights that stand for tokens, positions and kinds of tokens.
EMBEDDINGS = ("_embeddings", "embed_tokens", "embed_positions", "embed_in", "wte", "wpe")

Owners = dict[tuple[str, str], list[tuple[nn.Module, str]]]


@dataclass(frozen=True)
class Whole:
    """One array for every parameter of the backbone, the task head among them; its module is the path in the model.

    It has nothing at the target modules beside that: `rank` and `alpha` of the slot mean nothing.
    """

    basis: ClassVar[str] = ""

    def factors(self, rank: int, targets: Mapping[str, ModuleShape]) -> dict[str, dict[str, tuple[int, ...]]]:
        return {}

    def initial(self, module: str, factor: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.zeros(shape)

    def branch(self, arrays: Mapping[str, Tensor], scale: float) -> Branch:
        raise NotImplementedError("a slot of the whole model has no branch at a module")

    def scale(self, scale: float) -> float:
        return 1.0

    def low_rank(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        raise ModelError("a difference of all weights is no low-rank adapter")

    def offset(self, arrays: Mapping[str, Tensor]) -> Tensor | None:
        return None


WHOLE = Whole()


def embeddings() -> Selector:
    """The arrays of a whole slot that belong to embeddings, their layer norm aside: those whose name says so."""

    def test(key: str) -> bool:
        _, module, factor = split(key)
        parts = f"{module}.{factor}".split(".")
        return any(part.endswith(name) for part in parts for name in EMBEDDINGS)

    return Selector("embeddings", test)


def owners(backbone: nn.Module) -> Owners:
    """Every parameter by the path of its module and its own name, with all the modules that hold it: tied weights have
    several, and go by the first."""
    owners: dict[int, tuple[str, str]] = {}
    parameters: Owners = {}
    for path, module in backbone.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = owners.setdefault(id(parameter), (path or "model", name))
            parameters.setdefault(key, []).append((module, name))
    return parameters


def parameter_shapes(backbone: nn.Module) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shape of every parameter that a whole slot can change, by path and name; of floating-point ones alone."""
    return {
        key: tuple(modules[0][0]._parameters[modules[0][1]].shape)  # type: ignore[union-attr]
        for key, modules in owners(backbone).items()
        if modules[0][0]._parameters[modules[0][1]].is_floating_point()  # type: ignore[union-attr]
    }


class WholeWeights:
    """Puts `W + sum of the active whole slots' D` in place of W while a module computes.

    owners  the backbone's parameters and their modules, taken before anything was wrapped
    router  says which slots are active
    leaves  differences by slot, then by path and name
    """

    def __init__(self, owners: Owners, router: Router, leaves: Mapping[str, Mapping[tuple[str, str], Tensor]]) -> None:
        self._router = router
        self._leaves = leaves
        self._places: dict[nn.Module, list[tuple[str, tuple[str, str]]]] = {}
        keys = {key for arrays in leaves.values() for key in arrays}
        for key, modules in owners.items():
            for module, name in modules if key in keys else ():
                self._places.setdefault(module, []).append((name, key))
        self._originals: dict[nn.Module, dict[str, Any]] = {}
        self._hooks: list[RemovableHandle] = []
        for module in self._places:
            self._hooks.append(module.register_forward_pre_hook(self._put_in))
            self._hooks.append(module.register_forward_hook(self._take_out, always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def folded(self, slots: Sequence[str]) -> Iterator[None]:
        """With `W + D` of these slots as the backbone's parameters, for what reads them: writing a checkpoint."""
        for module in self._places:
            self._put(module, slots)
        try:
            yield
        finally:
            for module in self._places:
                self._take_out(module, None, None)

    def _put_in(self, module: nn.Module, inputs: Any) -> None:
        self._put(module, self._router.active)

    def _put(self, module: nn.Module, slots: Sequence[str]) -> None:
        active = [self._leaves[slot] for slot in slots if slot in self._leaves]
        if not active:
            return
        kept = self._originals[module] = {}
        for name, key in self._places[module]:
            weight = kept[name] = module._parameters[name]
            changed = weight.float()  # type: ignore[union-attr]
            for arrays in active:
                changed = changed + arrays[key]
            module._parameters[name] = changed.to(weight.dtype)  # type: ignore[assignment, union-attr]

    def _take_out(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, weight in self._originals.pop(module, {}).items():
            module._parameters[name] = weight
