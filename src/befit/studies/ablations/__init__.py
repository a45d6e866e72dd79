"""Ablations and comparators: train the branches of a method once, merge them many times, and say what changed."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.studies.ablations.measure import FinishedAblation, ablate

__all__ = ["FinishedAblation", "ablate"]

__getattr__, __dir__ = lazy(__name__, __file__)  # the list of ablations does not need torch
