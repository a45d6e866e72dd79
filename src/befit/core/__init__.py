"""What all else stands on: values that travel, errors, seeds, files, YAML and the wire. Imports nothing of befit."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.core.errors import (
        BefitError,
        ConfigError,
        DataError,
        IncompatibleAdapters,
        ModelError,
        NotEnoughReplies,
        NotTrained,
        PayloadMismatch,
        RunError,
    )
    from befit.core.plugins import load_plugins
    from befit.core.seeds import derive_seed
    from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, TensorSpec, Tick, Update
    from befit.core.yamlfile import parse_yaml, write_yaml

__all__ = [
    "BefitError",
    "ClientInfo",
    "ConfigError",
    "Cost",
    "DataError",
    "Failure",
    "IncompatibleAdapters",
    "ModelError",
    "NotEnoughReplies",
    "NotTrained",
    "Payload",
    "PayloadMismatch",
    "RunError",
    "Score",
    "TensorSpec",
    "Tick",
    "Update",
    "derive_seed",
    "load_plugins",
    "parse_yaml",
    "write_yaml",
]

__getattr__, __dir__ = lazy(__name__, __file__)
