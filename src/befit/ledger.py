"""What every exchange cost, and a list of everything that left each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.engine.wire import array_bytes, scalar_bytes
from befit.types import ClientInfo, Payload, Scalar

__all__ = ["Outbound"]


class Outbound:
    """For every client: name, shape, dtype, bytes and count of everything that left it.

    Kept where the client is, from the payload as encoded, before it is handed to the transport.
    """

    def __init__(self, entries: Mapping[str, list[dict[str, Any]]] | None = None) -> None:
        self._entries: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
        for client, rows in (entries or {}).items():
            self._entries[client] = {_identity(row): dict(row) for row in rows}

    def hello(self, info: ClientInfo) -> None:
        """What a client says of itself when it joins."""
        self.numbers(info.id, "hello", {"backbone": info.backbone, "num_examples": info.num_examples})

    def payload(self, client: str, stage: str, payload: Payload) -> None:
        for name, tensor in payload.arrays.items():
            self._count(client, stage, name, list(tensor.shape), str(tensor.dtype)[6:], array_bytes(tensor))
        self.numbers(client, stage, payload.scalars)

    def numbers(self, client: str, stage: str, values: Mapping[str, Scalar]) -> None:
        """Plain numbers; the count goes up, the bytes are those of the longest so far."""
        for name, value in values.items():
            self._count(client, stage, name, [], type(value).__name__, scalar_bytes(value))

    def _count(self, client: str, stage: str, name: str, shape: list[int], dtype: str, size: int) -> None:
        row = {"stage": stage, "name": name, "shape": shape, "dtype": dtype, "bytes": size, "count": 0}
        row = self._entries.setdefault(client, {}).setdefault(_identity(row), row)
        row["count"] += 1
        row["bytes"] = max(row["bytes"], size)

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """By client, then stage and name, so that equal runs give equal lists."""
        return {client: [rows[identity] for identity in sorted(rows)] for client, rows in sorted(self._entries.items())}


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["stage"], row["name"], tuple(row["shape"]), row["dtype"]
