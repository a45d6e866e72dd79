"""befit: bespoke federated fine-tuning. Every client of a federation ends with its own LoRA adapter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from befit.config.experiment import Experiment, load_experiment
    from befit.runs.runner import Run, run

from befit.core.version import __version__

__all__ = ["Experiment", "Run", "__version__", "load_experiment", "run"]

_HOMES = {
    "run": "befit.runs.runner",
    "Run": "befit.runs.runner",
    "Experiment": "befit.config.experiment",
    "load_experiment": "befit.config.experiment",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import befit` and `befit --help` do not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'befit' has no attribute {name!r}")
