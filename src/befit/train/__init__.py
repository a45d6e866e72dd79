"""Local training: passes over batches, terms that guide them, and estimates of curvature."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.train.loop import Pass, TrainingReport, train, training
    from befit.train.terms import L2, Distil, Laned, ProductDistance, Term, Tilt

__all__ = [
    "L2",
    "Distil",
    "Laned",
    "Pass",
    "ProductDistance",
    "Term",
    "Tilt",
    "TrainingReport",
    "train",
    "training",
]

__getattr__, __dir__ = lazy(__name__, __file__)
