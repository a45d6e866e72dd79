"""Methods side by side over seeds: a study or a configuration in; ordinary run directories, tables and plots out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from befit.studies.compare.comparison import Compared, compare

__all__ = ["Compared", "compare"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use: reading a study's head does not need torch."""
    if name in __all__:
        return getattr(import_module("befit.studies.compare.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
