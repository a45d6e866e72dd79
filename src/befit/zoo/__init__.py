"""Small backbones that ship with befit, so that everything runs without a network. Each has the script that made it."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from befit.core.errors import ModelError

__all__ = ["FOLDER", "zoo_names", "zoo_path"]

FOLDER = Path(__file__).parent


def zoo_names() -> list[str]:
    """Names of all models that ship."""
    return sorted(_pins())


def zoo_path(name: str) -> Path | None:
    """Directory of a model that ships, its weights checked against their SHA-256; None for another name.

    Raises ModelError when the weights are missing or not the ones that were published.
    """
    if name not in _pins():
        return None
    weights = FOLDER / name / "model.safetensors"
    if not weights.exists():
        raise ModelError(f"{name} ships with befit but its weights are missing: reinstall befit")
    if _digest(weights) != _pins()[name]:
        raise ModelError(f"the weights of {name} do not have the recorded hash: reinstall befit")
    return weights.parent


@cache
def _pins() -> dict[str, str]:
    return json.loads((FOLDER / "sha256.json").read_text())


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
