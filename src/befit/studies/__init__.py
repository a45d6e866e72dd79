"""Several runs as one question: comparisons, ablations, newcomers, the choice of models, and how alike models are."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.studies import ablations, adapt, cka, compare, select

__all__ = ["ablations", "adapt", "cka", "compare", "select"]

__getattr__, __dir__ = lazy(__name__, __file__)
