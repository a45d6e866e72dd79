"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from befit.core.errors import RunError
from befit.core.jsonfile import parse_json


def atomic_write(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write under a temporary name in the same folder, flush to the disk, and rename. `data` may come in pieces.

    Raises RunError, and leaves the old file as it was, if the disk is full or the folder cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise RunError(f"cannot write {path}: {error.strerror or error}; nothing half-written was kept") from error


def check_folder(path: Path) -> None:
    """Raise RunError unless this is a folder that can be written into, or can become one. Makes nothing."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise RunError(f"{there} exists already and is not a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{there} cannot be written into; name another folder")


def write_shared(path: Path, data: bytes, pool: Path) -> None:
    """`atomic_write` of what may be written again for others: equal files are one on the disk, by hard links to `pool`.

    Where the file system has no hard links each is a file of its own.
    """
    original = pool / hashlib.sha256(data).hexdigest()
    if not original.exists():
        atomic_write(original, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.link.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(original, temporary)
        os.replace(temporary, path)
    except OSError:
        atomic_write(path, data)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """JSON in two-space indentation with a final newline; keys keep their order, NaN and infinity become null."""
    pieces = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(finite(value))
    atomic_write(path, (piece.encode() for piece in chain(pieces, ["\n"])))


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), str(path), RunError)


def finite(value: Any) -> Any:
    """The same value with numbers that JSON does not have replaced by None."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
