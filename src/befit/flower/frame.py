"""Requests and replies as bytes: a safetensors file with a JSON header, and the hash that names it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from befit.core.errors import PayloadMismatch

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from befit.core.values import State

PROTOCOL = 2  # goes up whenever an older site could misunderstand a newer server


def pack(header: Mapping[str, Any], arrays: State) -> bytes:
    """Header and arrays as bytes, the same for the same content. Arrays keep their dtype, bfloat16 too."""
    from befit.core.wire import to_bytes

    return to_bytes(arrays, {"header": json.dumps(header)})


def unpack(data: bytes, what: str) -> tuple[dict[str, Any], State]:
    """What `pack` packed. Raises PayloadMismatch, naming `what`, for anything else."""
    from befit.core.wire import from_bytes

    arrays, metadata = from_bytes(data, what)
    try:
        header = json.loads(metadata["header"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise PayloadMismatch(f"{what} has no header") from error
    if not isinstance(header, dict):
        raise PayloadMismatch(f"{what} has a header that is no mapping")
    return header, arrays


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


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
        raise PayloadMismatch(f"a message without a frame and its hash ({error}): it is not befit's") from error
    if digest(frame) != expected:
        raise PayloadMismatch(f"a frame of {len(frame)} bytes does not match its hash: it was altered on the way")
    return frame
