"""Requests and replies as bytes: a safetensors file with a JSON header, and the hash that names it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from befit.core.errors import PayloadMismatch
from befit.core.text import readable

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from befit.core.values import State

PROTOCOL = 5  # goes up whenever an older site could misunderstand a newer server
# A frame's own part, beside the arrays' bytes: their names, dtypes and shapes, and the header. An adapter of ten
# thousand arrays has 2 MiB of it.
MOST_BYTES, MOST_ARRAYS, LONGEST_NAME, MOST_AXES, DEEPEST = 2**22, 2**14, 400, 8, 16


def pack(header: Mapping[str, Any], arrays: State) -> bytes:
    """Header and arrays as bytes, the same for the same content. Arrays keep their dtype, bfloat16 too."""
    from befit.core.wire import to_bytes

    return to_bytes(arrays, {"header": json.dumps(header)})


def unpack(data: bytes, what: str) -> tuple[dict[str, Any], State]:
    """What `pack` packed.

    Raises PayloadMismatch, naming `what`, for anything else. What is too large, too deep or too long, or has two
    entries of one name or half a character, is refused before an array is made of it.
    """
    from befit.core.wire import from_bytes

    length = int.from_bytes(data[:8], "little")
    if MOST_BYTES < length < len(data):
        raise PayloadMismatch(f"{what} has {length} bytes of names and header, more than {MOST_BYTES}")
    try:
        if length > len(data):
            raise ValueError("no safetensors file")
        entries = _json(data[8 : 8 + length])
        header = _json(entries.pop("__metadata__")["header"])
        _check_texts(header, DEEPEST)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        from_bytes(data, what)  # which says what is wrong with bytes that are no such file
        raise PayloadMismatch(f"{what} has no header, or one that cannot be read") from error
    if not isinstance(header, dict):
        raise PayloadMismatch(f"{what} has a header that is no mapping")
    _check_arrays(entries, what)
    return header, from_bytes(data, what)[0]


def bytes_of_arrays(data: bytes) -> int:
    """What a frame has beside its own part, which `unpack` limits."""
    return max(0, len(data) - 8 - int.from_bytes(data[:8], "little"))


def _json(text: str | bytes) -> Any:
    """Raises ValueError also for two entries of one name, of which two readers could take different ones."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("two entries of one name")
        return values

    return json.loads(text, object_pairs_hook=once)


def _check_arrays(entries: Mapping[str, Any], what: str) -> None:
    if len(entries) > MOST_ARRAYS:
        raise PayloadMismatch(f"{what} has {len(entries)} arrays, more than {MOST_ARRAYS}")
    for name, entry in entries.items():
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise PayloadMismatch(f"{what} has an array with an invalid name: {readable(name, 100)}")
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and len(shape) > MOST_AXES:
            raise PayloadMismatch(f"{what} has an array of {len(shape)} axes: {readable(name, 100)}")


def _check_texts(value: Any, depth: int) -> None:
    """Raise ValueError for what nests too deep, and for half of a surrogate pair, which no file could hold."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, (dict, list)):
        if not depth:
            raise ValueError("nested too deep")
        for inner in value:
            _check_texts(inner, depth - 1)
        for inner in value.values() if isinstance(value, dict) else ():
            _check_texts(inner, depth - 1)


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_of_run(settings: Any, method: Any) -> str:
    """SHA-256 of what a site was told that a run is, of one method."""
    return digest(json.dumps([settings, method], sort_keys=True).encode())


def to_content(frame: bytes) -> RecordDict:
    """One array of bytes, which Flower cuts into chunks of 5 MiB, its SHA-256, and a nonce.

    Flower names a message by a hash of what it holds, and of a reply it believes its own word about who sends it. With
    the nonce only the site that was asked can know the name of the message, so nobody can reply in its place.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    proof = ConfigRecord({"sha256": digest(frame), "nonce": secrets.token_hex(16)})
    array = Array(dtype="uint8", shape=(len(frame),), stype="befit.frame", data=frame)
    return RecordDict({"frame": ArrayRecord({"frame": array}), "proof": proof})


def from_content(content: RecordDict) -> bytes:
    """Raises PayloadMismatch unless the content is a frame that matches its hash."""
    try:
        frame = content.array_records["frame"]["frame"].data
        expected = content.config_records["proof"]["sha256"]
    except (KeyError, TypeError, AttributeError) as error:
        raise PayloadMismatch("a message without a frame and its hash: it is not befit's") from error
    if digest(frame) != expected:
        raise PayloadMismatch(f"a frame of {len(frame)} bytes does not match its hash: it was altered on the way")
    return frame
