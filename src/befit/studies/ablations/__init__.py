"""Ablations and comparators: train the branches of a method once, merge them many times, and say what changed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from befit.studies.ablations.ablate import Finished, ablate

__all__ = ["Finished", "ablate"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use: the list of ablations does not need torch."""
    if name in __all__:
        return getattr(import_module("befit.studies.ablations.ablate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
