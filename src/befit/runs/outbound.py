"""A list of everything that left each client."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from befit.core.values import ClientInfo, Payload, Scalar
from befit.core.wire import scalar_bytes

_Array = tuple[str, str, tuple[int, ...], str]  # stage, name, shape, dtype
_Number = tuple[str, str, str]  # stage, name, type


class Outbound:
    """For every client: name, shape, dtype, bytes and count of everything that left it.

    Kept where the client is, from the payload as encoded, before it is handed to the transport. What is sent together
    is the same at many clients and in many rounds, so it is held once and each client has a count of it.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._known: dict[tuple[_Array, ...], tuple[_Array, ...]] = {}
        self._arrays: dict[str, dict[tuple[_Array, ...], int]] = {}
        self._numbers: dict[str, dict[_Number, tuple[int, int]]] = {}  # bytes of the longest so far, count
        if saved is not None:
            known = [tuple((s, n, tuple(shape), dtype) for s, n, shape, dtype in rows) for rows in saved["payloads"]]
            self._known = {rows: rows for rows in known}
            self._arrays = {c: {known[i]: count for i, count in counts} for c, counts in saved["arrays"].items()}
            self._numbers = {
                client: {(stage, name, kind): (size, count) for stage, name, kind, size, count in rows}
                for client, rows in saved["numbers"].items()
            }

    def hello(self, info: ClientInfo) -> None:
        """What a client says of itself when it joins; listed once."""
        if any(stage == "hello" for stage, *_ in self._numbers.get(info.id, ())):
            return
        self.numbers(info.id, "hello", {"backbone": info.backbone, "num_examples": info.num_examples})

    def payload(self, client: str, stage: str, payload: Payload) -> None:
        rows = tuple((stage, name, tuple(t.shape), str(t.dtype)[6:]) for name, t in payload.arrays.items())
        if rows:
            rows = self._known.setdefault(rows, rows)
            counts = self._arrays.setdefault(client, {})
            counts[rows] = counts.get(rows, 0) + 1
        self.numbers(client, stage, payload.scalars)

    def numbers(self, client: str, stage: str, values: Mapping[str, Scalar]) -> None:
        """Plain numbers; the count goes up, the bytes are those of the longest so far."""
        mine = self._numbers.setdefault(client, {})
        for name, value in values.items():
            key = stage, name, type(value).__name__
            largest, count = mine.get(key, (0, 0))
            mine[key] = max(largest, scalar_bytes(value)), count + 1

    def saved(self) -> dict[str, Any]:
        """The same in little space, for a checkpoint; the constructor takes it."""
        places = {rows: index for index, rows in enumerate(self._known)}
        return {
            "payloads": list(self._known),
            "arrays": {c: [[places[rows], n] for rows, n in counts.items()] for c, counts in self._arrays.items()},
            "numbers": {c: [[*key, *value] for key, value in mine.items()] for c, mine in self._numbers.items()},
        }

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """By client, then stage and name, so that equal runs give equal lists."""
        return {client: self._rows(client) for client in sorted(self._arrays.keys() | self._numbers.keys())}

    def _rows(self, client: str) -> list[dict[str, Any]]:
        totals: dict[_Array, tuple[int, int]] = {}
        for rows, count in self._arrays.get(client, {}).items():
            for row in rows:
                size = prod(row[2]) * getattr(torch, row[3]).itemsize
                totals[row] = size, totals.get(row, (0, 0))[1] + count
        for (stage, name, kind), value in self._numbers.get(client, {}).items():
            totals[(stage, name, (), kind)] = value
        return [
            {"stage": stage, "name": name, "shape": list(shape), "dtype": dtype, "bytes": size, "count": count}
            for (stage, name, shape, dtype), (size, count) in sorted(totals.items())
        ]
