"""The keys and values of tokens that a model has read, by the name that its version of transformers has for them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before, where code that comes with models stays


def cache_name(model: Any) -> str:
    """The argument of a model's `forward` that takes a cache, which its output has it under too."""
    return next((name for name in NAMES if name in inspect.signature(model.forward).parameters), NAMES[-1])


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a forward pass, under either name; None without one."""
    return next((inputs[name] for name in NAMES if inputs.get(name) is not None), None)
