"""Runs as a person asks for them: a configuration in, a directory with adapters, numbers and a report out."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.runs.artifacts import predict
    from befit.runs.exporting import export
    from befit.runs.host import Host
    from befit.runs.loading import load_federation
    from befit.runs.runner import Run, run

__all__ = ["Host", "Run", "export", "load_federation", "predict", "run"]

__getattr__, __dir__ = lazy(__name__, __file__)
