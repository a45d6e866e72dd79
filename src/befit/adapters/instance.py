"""Weights of two slots for every single input, by its likeness to examples of the client (FedDPA, Yang et al. 2024).

`omega = limit * mean_s max(0, cos(h_x, h_s))`, `h` the last hidden state of an input's last token under the second
slot, `h_s` those of the client's reference examples, which are an array of the model's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.keys import EVERYTHING
from befit.adapters.layer import Mixed, SlotLinear, weigh_up
from befit.adapters.layout import REFERENCES
from befit.core.caches import cache_of
from befit.core.values import IGNORED

T = TypeVar("T")
Kept = dict[str, Tensor]
_INPUT_ENDS: ContextVar[Tensor | int] = ContextVar("input_ends", default=0)
_KEPT: ContextVar[Kept | None] = ContextVar("kept", default=None)
_OMEGA = "omega"


@contextmanager
def input_ends(at: Tensor | int, kept: Kept | None = None) -> Iterator[None]:
    """Say, around a forward pass, which token stands for the input: its place, the place of every input (batch,), or
    the labels (batch, tokens) of a language model, whose answer the input ends before. Without it, the first: an
    encoder's class token.

    kept  where a mixer leaves what it found of each input, (batch, …), for passes that continue cached tokens; whoever
          takes inputs out of the cache takes their rows out of here too
    """
    tokens = _INPUT_ENDS.set(at), _KEPT.set(kept)
    try:
        yield
    finally:
        _INPUT_ENDS.reset(tokens[0])
        _KEPT.reset(tokens[1])


def summaries(backbone: nn.Module) -> AbstractContextManager[list[Tensor]]:
    """Collect `h` (batch, hidden) of every forward pass."""
    return hidden_states(backbone, lambda states: _at_end(states[-1]))


@contextmanager
def hidden_states(backbone: nn.Module, kept: Callable[[tuple[Tensor, ...]], T]) -> Iterator[list[T]]:
    """Collect what `kept` makes of every forward pass's hidden states, after the embedding and after each block."""
    collected: list[T] = []

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_hidden_states": True}

    def collect(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        collected.append(kept(output.hidden_states))

    handles = [backbone.register_forward_pre_hook(ask, with_kwargs=True), backbone.register_forward_hook(collect)]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


def _at_end(hidden: Tensor) -> Tensor:
    """(batch, hidden) of (batch, tokens, hidden), float32: at the token that stands for the input."""
    ends = _INPUT_ENDS.get()
    if isinstance(ends, Tensor):
        places = ends if ends.dim() == 1 else ((ends != IGNORED).int().argmax(1) - 1).clamp_min(0)
        return hidden[torch.arange(len(hidden), device=hidden.device), places].detach().float()
    return hidden[:, ends].detach().float()


def omega(inputs: Tensor, references: Tensor, limit: float) -> Tensor:
    """(batch,) weights of inputs with the states (batch, hidden), beside references (count, hidden)."""
    likeness = F.normalize(inputs, dim=-1) @ F.normalize(references, dim=-1).T  # (batch, references)
    return limit * likeness.clamp_min(0).mean(-1)


class InstanceMixer:
    """`y + (1 - omega) s_1 h_1 + omega s_2 h_2` for two slots, omega anew for every forward pass over new inputs.

    limit      the largest omega
    direction  "similar" gives the second slot omega; "reference" gives it to the first, as the released code does

    Passes that continue cached tokens keep the weights of their prompts, see `input_ends`.
    """

    def __init__(self, model: Mixed, limit: float, direction: str) -> None:
        self._model, self._limit, self._similar = model, limit, direction == "similar"
        self._omega: Tensor | None = None
        self._kept: Kept = {}

    def __call__(self, layer: SlotLinear, x: Tensor, dropped: Tensor, y: Tensor) -> Tensor:
        assert self._omega is not None
        pair = (1 - self._omega, self._omega)
        return weigh_up(layer, pair if self._similar else pair[::-1], x, dropped, y)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the inputs of every forward pass before it runs."""
        handle = self._model.backbone.register_forward_pre_hook(self._before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._model.mixer is not self:  # another's pass, within this one's
            return
        kept = _KEPT.get()
        kept = self._kept if kept is None else kept
        if cache_of(kwargs) is None or _OMEGA not in kept:
            kept[_OMEGA] = self._compare(backbone, args, kwargs)
        self._omega = kept[_OMEGA]

    def _compare(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        plain = {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs
        model = self._model
        with model.training(False), model.active(model.active_slots[-1]), summaries(backbone) as inputs:
            backbone(*args, **plain)
        references = self._model.leaves(EVERYTHING)[REFERENCES]
        return omega(inputs[0], references, self._limit)
