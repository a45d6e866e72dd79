"""A frame of bytes as Flower's record, and back."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from befit.core.errors import PayloadMismatch
from befit.flower.frame import digest

__all__ = ["from_content", "to_content"]


def to_content(frame: bytes) -> RecordDict:
    """One array of bytes, which Flower cuts into chunks of 5 MiB, and its SHA-256."""
    array = Array(dtype="uint8", shape=(len(frame),), stype="befit.frame", data=frame)
    return RecordDict({"frame": ArrayRecord({"frame": array}), "proof": ConfigRecord({"sha256": digest(frame)})})


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
