"""befit: bespoke federated fine-tuning. Every client of a federation ends with its own LoRA adapter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from befit.config import Experiment, load_experiment
    from befit.runner import Run, run

__version__ = "0.1.0"
__all__ = ["Experiment", "Run", "__version__", "load_experiment", "run"]

_HOMES = {"run": "befit.runner", "Run": "befit.runner", "Experiment": "befit.config", "load_experiment": "befit.config"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import befit` and `befit --help` do not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'befit' has no attribute {name!r}")
