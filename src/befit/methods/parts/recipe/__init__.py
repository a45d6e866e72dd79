"""Recipes: methods composed of parts, as values."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.methods.parts.recipe.branches import BranchMerge, MergeBranches, keep_best, two_branches
    from befit.methods.parts.recipe.personal import Adopt, LocalTraining, Remember
    from befit.methods.parts.recipe.recipe import PersonalStage, Recipe
    from befit.methods.parts.recipe.route import Broadcast, LeaveOneOut, Route
    from befit.protocol.method import Use

__all__ = [
    "Adopt",
    "BranchMerge",
    "Broadcast",
    "LeaveOneOut",
    "LocalTraining",
    "MergeBranches",
    "PersonalStage",
    "Recipe",
    "Remember",
    "Route",
    "Use",
    "keep_best",
    "two_branches",
]

__getattr__, __dir__ = lazy(__name__, __file__)
