"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from befit.core.errors import Damaged, RunError
from befit.core.jsonfile import parse_json

_WIDTH = 120  # of a line of JSON, without its key
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_SEAL = re.compile(rb',\n  "checksum": "([0-9a-f]{64})"\n}\n')
_LINE = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}')


def atomic_write(path: Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o644) -> None:
    """Write under a temporary name in the same folder, flush to the disk, and rename. `data` may come in pieces.

    Once this returns, the file is there after a power cut too: its name and its folder's are flushed as well.
    Raises RunError, and leaves the old file as it was, if the disk is full or the folder cannot be written.
    """
    temporary: str | None = None
    try:
        _make_folder(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # until here it is its owner's alone
        os.replace(temporary, path)
        temporary = None
        _flush_names(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; nothing half-written was kept") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def remove_litter(folder: Path) -> None:
    """Remove what processes that were killed in the middle of a write left in a folder and those inside it.

    Only for whoever holds the folder's lock. Folders inside it with a lock of their own are left alone.
    """
    for root, folders, names in os.walk(folder):
        if ".lock" in names and Path(root) != folder:
            folders.clear()
            continue
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                (Path(root) / name).unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """The folder and those above it, each durable in the one that it is in."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _flush_names(folder.parent)


def _flush_names(folder: Path) -> None:
    """Make durable which names a folder holds. A file system that cannot do so for folders is left as it is."""
    if sys.platform == "win32":  # which opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def check_folder(path: Path) -> None:
    """Raise RunError unless this is a folder that can be written into, or can become one. Makes nothing."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise RunError(f"{there} exists already and is not a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{there} cannot be written into; name another folder")


def write_shared(path: Path, data: bytes, originals: Path) -> None:
    """`atomic_write` of what may be written again for others: equal files are one on the disk, by hard links.

    originals  folder of the files that the links are to
    Where the file system has no hard links each is a file of its own.
    """
    original = originals / hashlib.sha256(data).hexdigest()
    if not original.exists():
        atomic_write(original, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.link.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(original, temporary)
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # it is still there where `path` was that link already
    except OSError:
        atomic_write(path, data)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error


def read_durable(path: Path) -> bytes:
    """The content of a file that must be there and whole; whoever reads it checks the latter. Raises Damaged."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}") from error


def write_sealed(path: Path, value: dict[str, Any], mode: int = 0o644) -> None:
    """`write_json` with a last key `checksum`: SHA-256 of all bytes before it."""
    text = json_text(value).removesuffix("\n}").encode()
    atomic_write(path, [text, b',\n  "checksum": "%s"\n}\n' % hashlib.sha256(text).hexdigest().encode()], mode)


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote, without the checksum. Raises Damaged unless every byte is as it was written."""
    data = read_durable(path)
    seal = _SEAL.search(data, max(0, len(data) - 90))
    if seal is None or seal.end() != len(data):
        raise Damaged(f"{path} is damaged: it does not end with its checksum")
    text = data[: seal.start()]
    if hashlib.sha256(text).hexdigest().encode() != seal[1]:
        raise Damaged(f"{path} is damaged: its content does not match its checksum")
    return json.loads(text + b"}")


def log_line(value: dict[str, Any]) -> bytes:
    """One line of a log, with a last key `crc32`: that of all bytes before it.

    >>> log_line({"loss": 0.5})
    b'{"loss": 0.5, "crc32": "3fbba076"}\\n'
    """
    text = _with_finite(_ENCODE, value).encode().removesuffix(b"}")
    return text + b', "crc32": "%08x"}\n' % zlib.crc32(text)


def read_lines(path: Path, length: int | None = None) -> list[dict[str, Any]]:
    """The lines of a log, without their checksums, or those in its first `length` bytes; none where there is no file.

    Raises Damaged for a log that is shorter, or that has a line which is not as it was written, naming it.
    """
    if not path.exists() and not length:
        return []
    data = read_durable(path)
    if length is not None and len(data) < length:
        raise Damaged(f"{path} is damaged: it has {len(data)} bytes, and its checkpoint counts {length}")
    return parse_lines(data[:length], path)


def parse_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The lines of a log that was read from `path`, without their checksums.

    Raises Damaged for a line that is not as it was written, naming it.
    """
    lines = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        match = _LINE.fullmatch(line.removesuffix(b"\n"))
        if match is None or not line.endswith(b"\n") or b"%08x" % zlib.crc32(match[1]) != match[2]:
            raise Damaged(f"{path} is damaged in line {number}: it does not match its checksum")
        lines.append(json.loads(match[1] + b"}"))
    return lines


def write_json(path: Path, value: Any) -> None:
    """JSON with a final newline; keys keep their order, NaN and infinity become null."""
    atomic_write(path, f"{json_text(value)}\n".encode())


def json_text(value: Any) -> str:
    """JSON to be read by people too: what fits on a line is on one, other lists and mappings have a line an entry.

    >>> print(json_text({"shape": [8, 64], "loss": float("nan")}))
    {
      "shape": [8, 64],
      "loss": null
    }
    """

    def lines(value: Any, indent: str, most: int) -> str:
        text = _ENCODE(value)
        if len(indent) + len(text) <= most or not value or not isinstance(value, (dict, list, tuple)):
            return text
        inner = indent + "  "
        if isinstance(value, dict):
            entries = [f"{inner}{_ENCODE(key)}: {lines(item, inner, _WIDTH)}" for key, item in value.items()]
        else:
            entries = [inner + lines(item, inner, _WIDTH) for item in value]
        begin, end = "{}" if isinstance(value, dict) else "[]"
        return f"{begin}\n" + ",\n".join(entries) + f"\n{indent}{end}"

    return _with_finite(lambda whole: lines(whole, "", 0), value)


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), str(path), RunError)


def _with_finite(encode: Callable[[Any], str], value: Any) -> str:
    """`encode(finite(value))`; nearly every value is one that JSON has, and is not copied."""
    try:
        return encode(value)
    except (TypeError, ValueError):
        return encode(finite(value))


def finite(value: Any) -> Any:
    """The same value with numbers that JSON does not have replaced by None."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
