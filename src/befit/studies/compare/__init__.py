"""Methods side by side over seeds: a study or a configuration in; ordinary run directories, tables and plots out."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.studies.compare.comparison import Compared, compare
    from befit.studies.compare.results import Comparison

__all__ = ["Compared", "Comparison", "compare"]

__getattr__, __dir__ = lazy(__name__, __file__)  # a study's head is read without torch
