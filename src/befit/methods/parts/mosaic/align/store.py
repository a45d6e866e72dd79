"""Aligned factors as files: one for each backbone, with everything that they depend on beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from befit.adapters.state import fingerprint
from befit.core.errors import PayloadMismatch
from befit.core.storage import atomic_write, read_bytes
from befit.core.values import State
from befit.core.wire import from_bytes, to_bytes

__all__ = ["load", "path_of", "save"]


def path_of(folder: Path | str, backbone: str) -> Path:
    return Path(folder) / f"{backbone}.safetensors"


def save(folder: Path | str, backbone: str, arrays: State, about: Mapping[str, Any]) -> None:
    """Write a backbone's aligned basis, its SHA-256 and what it depends on."""
    text = json.dumps({**about, "sha256": fingerprint(arrays)}, sort_keys=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    atomic_write(path_of(folder, backbone), to_bytes(arrays, {"about": text}))


def load(folder: Path | str, backbone: str, about: Mapping[str, Any]) -> State | None:
    """The basis that was saved for this backbone; None where there is none.

    Raises PayloadMismatch naming what differs, if it was made for something else or its arrays were changed.
    """
    path = path_of(folder, backbone)
    if not path.exists():
        return None
    arrays, metadata = from_bytes(read_bytes(path), str(path))
    found = json.loads(metadata.get("about", "{}"))
    for key, value in about.items():
        if found.get(key) != value:
            raise PayloadMismatch(
                f"{path} was aligned with another {key}: {_short(found.get(key))}, and this run has "
                f"{_short(value)}; use another align.folder, or remove the file"
            )
    if found.get("sha256") != fingerprint(arrays):
        raise PayloadMismatch(f"{path}: its arrays are not those that were saved; remove the file to align anew")
    return arrays


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
