"""Several runs as one question: comparisons, ablations, adaptation of newcomers, and the choice of models."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.studies import ablations, adapt, compare, select

__all__ = ["ablations", "adapt", "compare", "select"]

__getattr__, __dir__ = lazy(__name__, __file__)
