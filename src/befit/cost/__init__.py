"""What a run will take, from shapes alone."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.cost.architecture import Architecture, builtin_architectures, find_architecture
    from befit.cost.compare import method_cost, relative_cost, with_savings

__all__ = ["Architecture", "builtin_architectures", "find_architecture", "method_cost", "relative_cost", "with_savings"]

__getattr__, __dir__ = lazy(__name__, __file__)
