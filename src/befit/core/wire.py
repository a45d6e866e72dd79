"""Payloads on the wire: cast, count, and turn into bytes and back, without pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from befit.core.errors import Damaged, PayloadMismatch
from befit.core.values import Payload, Scalar, State, TensorSpec

_START = b'{"__metadata__": {"checksum": "'
_BLANK = "0" * 64
DTYPE_NAMES = {  # as safetensors writes them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def cast(payload: Payload, dtype: torch.dtype) -> Payload:
    """Floating-point arrays in another dtype; a payload that has it already comes back as it is."""
    if all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in payload.arrays.values()):
        return payload
    arrays = {k: t.to(dtype) if t.is_floating_point() else t for k, t in payload.arrays.items()}
    return Payload(arrays, payload.scalars)


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of a declared array."""
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def scalar_bytes(value: Scalar) -> int:
    return len(json.dumps(value).encode())


def payload_bytes(payload: Payload) -> int:
    """Bytes of all values as they travel; names, shapes and framing are the transport's business."""
    return sum(array.nbytes for array in payload.arrays.values()) + sum(map(scalar_bytes, payload.scalars.values()))


def to_bytes(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, in memory."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in arrays.items()}
    # The library writes a broken header for no tensors with empty metadata.
    return bytes(safetensors.torch.save(tensors, dict(metadata) or None))


def pieces(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file with a checksum of all its bytes in its metadata, piece by piece: there is no second copy of
    the arrays in memory. `whole` checks it."""
    order = sorted(arrays, key=lambda key: (-arrays[key].element_size(), key))  # large elements first: all are aligned
    header: dict[str, object] = {"__metadata__": {"checksum": _BLANK, **metadata}}
    start = 0
    for key in order:
        end = start + arrays[key].nbytes
        header[key] = {
            "dtype": DTYPE_NAMES[arrays[key].dtype],
            "shape": list(arrays[key].shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    digest = hashlib.sha256(length + text)
    for data in _data(arrays, order):
        digest.update(data)
    yield length
    yield _START + digest.hexdigest().encode() + text[len(_START) + len(_BLANK) :]
    yield from _data(arrays, order)


def _data(arrays: Mapping[str, Tensor], order: Iterable[str]) -> Iterator[memoryview]:
    for key in order:
        if arrays[key].numel():
            flat = arrays[key].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def whole(data: bytes, what: str) -> bytes:
    """The bytes of a file that `pieces` made, as they are. Raises Damaged, naming `what`, if any is not as it was."""
    at = 8 + len(_START)
    end = at + len(_BLANK)
    if data[8:at] != _START:
        raise Damaged(f"{what} is damaged: it does not begin with its checksum")
    digest = hashlib.sha256(data[:at])
    digest.update(_BLANK.encode())
    digest.update(memoryview(data)[end:])
    if digest.hexdigest().encode() != data[at:end]:
        raise Damaged(f"{what} is damaged: its content does not match its checksum")
    return data


def whole_if_told(data: bytes, what: str) -> bytes:
    """As `whole`, of a file that may come from elsewhere and have no checksum."""
    return whole(data, what) if data[8 : 8 + len(_START)] == _START else data


def from_bytes(data: bytes, what: str = "a payload") -> tuple[State, dict[str, str]]:
    """Arrays and metadata of a safetensors file. Raises PayloadMismatch if the bytes are not one."""
    try:
        arrays = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise PayloadMismatch(f"{what} is not a readable safetensors file: {error}") from error
    return arrays, metadata
