"""Payloads on the wire: cast, count, and turn into bytes and back, without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, Scalar, State

_NAMES = {
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


def array_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def scalar_bytes(value: Scalar) -> int:
    return len(json.dumps(value).encode())


def payload_bytes(payload: Payload) -> int:
    """Bytes of all values as they travel; names, shapes and framing are the transport's business."""
    return sum(map(array_bytes, payload.arrays.values())) + sum(map(scalar_bytes, payload.scalars.values()))


def to_bytes(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, in memory."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in arrays.items()}
    # The library writes a broken header for no tensors with empty metadata.
    return bytes(safetensors.torch.save(tensors, dict(metadata) or None))


def pieces(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The same file, piece by piece, for arrays of which there should be no second copy in memory."""
    order = sorted(arrays, key=lambda key: (-arrays[key].element_size(), key))  # large elements first: all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for key in order:
        end = start + array_bytes(arrays[key])
        header[key] = {
            "dtype": _NAMES[arrays[key].dtype],
            "shape": list(arrays[key].shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for key in order:
        if arrays[key].numel():
            flat = arrays[key].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def from_bytes(data: bytes, what: str = "a payload") -> tuple[State, dict[str, str]]:
    """Arrays and metadata of a safetensors file. Raises PayloadMismatch if the bytes are not one."""
    try:
        arrays = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise PayloadMismatch(f"{what} is not a readable safetensors file: {error}") from error
    return arrays, metadata
