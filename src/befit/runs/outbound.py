"""A list of everything that left each client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from befit.core.values import NO_REPLY, REFUSED, Failure, Payload, Scalar, Score, TensorSpec, Update, dtype_name
from befit.core.wire import scalar_bytes
from befit.core.wire_form import Wire
from befit.protocol.privacy import EPSILON

_Array = tuple[str, str, tuple[int, ...], str]  # stage, name, shape, dtype
_Number = tuple[str, str, str]  # stage, name, type
_MOST_NUMBERS = 2000  # of one client; what else it sends is counted under one name
_LONGEST_FLOAT = len(repr(-2.2250738585072014e-308))


@lru_cache(maxsize=64)
def _rows(wire: Wire, stage: str, arrays: tuple[tuple[str, torch.Size, torch.dtype], ...]) -> tuple[_Array, ...]:
    """What travels for the arrays of a reply."""
    return tuple(
        (stage, name, spec.shape, spec.dtype)
        for key, shape, dtype in arrays
        for name, spec in wire.sent_up(key, TensorSpec(tuple(shape), dtype_name(dtype))).items()
    )


class Outbound:
    """For every client: name, shape, dtype, bytes and count of everything that left it.

    A site notes its replies before they are handed to the transport, the server those that it took, each in the words
    of the same methods. What is sent together is the same at many clients and in many rounds, so it is held once and
    each client has a count of it.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._known: dict[tuple[_Array, ...], tuple[_Array, ...]] = {}
        self._arrays: dict[str, dict[tuple[_Array, ...], int]] = {}
        self._numbers: dict[str, dict[_Number, tuple[int, int]]] = {}  # bytes of the longest so far, count
        self._spent: dict[str, float] = {}  # epsilon of everything listed, where single examples are protected
        if saved is not None:
            payloads = [tuple((s, n, tuple(shape), dtype) for s, n, shape, dtype in rows) for rows in saved["payloads"]]
            self._known = {rows: rows for rows in payloads}
            self._arrays = {c: {payloads[i]: count for i, count in counts} for c, counts in saved["arrays"].items()}
            self._numbers = {
                client: {(stage, name, kind): (size, count) for stage, name, kind, size, count in rows}
                for client, rows in saved["numbers"].items()
            }
            self._spent = dict(saved.get("spent", {}))

    def hello(self, client: str, values: Mapping[str, Any]) -> None:
        """What a client says of itself when it joins; listed once."""
        if not any(stage == "hello" for stage, *_ in self._numbers.get(client, ())):
            self.numbers(client, "hello", values)

    def note(self, reply: Update | Score | Failure, stage: str, wire: Wire) -> None:
        """Everything in a reply: of one to training its arrays, in the form of the wire, its numbers and its report;
        of a score its metrics; of a failure what the client says of it; and what it says that each of them took.

        For a reply that the server refused only its size is listed; for one that never came, nothing.
        """
        if isinstance(reply, Update):
            self._payload(reply.client.id, stage, reply.payload, wire)
            self.numbers(reply.client.id, f"{stage} report", reply.report)
            if EPSILON in reply.report:
                self._spent[reply.client.id] = reply.report[EPSILON]
            self._cost(reply.client.id, stage)
        elif isinstance(reply, Score):
            self.numbers(reply.client, f"score {reply.split}", {**reply.metrics, "examples": reply.examples})
            self._cost(reply.client, f"score {reply.split}")
        elif reply.kind == REFUSED:
            self._note(reply.client, (f"{stage} failure", "refused reply", "bytes"), reply.cost.bytes_up)
        elif reply.kind not in NO_REPLY:
            self.numbers(reply.client, f"{stage} failure", {"error": reply.kind, "reason": reply.reason})
            if reply.cost.seconds:  # the refusal of a request comes without
                self._cost(reply.client, stage)

    def numbers(self, client: str, stage: str, values: Mapping[str, Scalar]) -> None:
        """Plain numbers; the count goes up, the bytes are those of the longest so far."""
        for name, value in values.items():
            self._note(client, (stage, name, type(value).__name__), scalar_bytes(value))

    def _payload(self, client: str, stage: str, payload: Payload, wire: Wire) -> None:
        rows = _rows(wire, stage, tuple((key, array.shape, array.dtype) for key, array in payload.arrays.items()))
        if rows:
            rows = self._known.setdefault(rows, rows)
            counts = self._arrays.setdefault(client, {})
            counts[rows] = counts.get(rows, 0) + 1
        self.numbers(client, stage, payload.scalars)

    def _cost(self, client: str, stage: str) -> None:
        """What is measured differs from run to run, and so does the length of its text: the longest is listed."""
        for name in ("seconds", "cpu_seconds", "peak_memory_mib"):
            self._note(client, (f"{stage} cost", name, "float"), _LONGEST_FLOAT)

    def _note(self, client: str, key: _Number, size: int) -> None:
        of_client = self._numbers.setdefault(client, {})
        if key not in of_client and len(of_client) >= _MOST_NUMBERS:
            key = ("any", "further numbers", "any")
        largest, count = of_client.get(key, (0, 0))
        of_client[key] = max(largest, size), count + 1

    def of_stages(self, stages: Collection[str]) -> Outbound:
        """What left in the training of these stages: without scores and greetings."""
        words = {f"{stage}{kind}" for stage in stages for kind in ("", " report", " cost", " failure")}
        chosen = Outbound()
        for client, counts in self._arrays.items():
            if arrays := {rows: count for rows, count in counts.items() if rows[0][0] in words}:
                chosen._arrays[client] = arrays
                chosen._known |= {rows: rows for rows in arrays}
        for client, numbers in self._numbers.items():
            if sizes := {key: value for key, value in numbers.items() if key[0] in words}:
                chosen._numbers[client] = sizes
        return chosen

    def add(self, other: Outbound) -> None:
        """List also what another run lists, of stages that this one has not begun."""
        self._known |= {rows: self._known.get(rows, rows) for rows in other._known}
        for client, counts in other._arrays.items():
            self._arrays.setdefault(client, {}).update({self._known[rows]: count for rows, count in counts.items()})
        for client, numbers in other._numbers.items():
            self._numbers.setdefault(client, {}).update(numbers)

    def saved(self) -> dict[str, Any]:
        """The same in little space, for a checkpoint; the constructor takes it."""
        places = {rows: index for index, rows in enumerate(self._known)}
        return {
            "payloads": list(self._known),
            "arrays": {c: [[places[rows], n] for rows, n in counts.items()] for c, counts in self._arrays.items()},
            "numbers": {c: [[*key, *value] for key, value in sizes.items()] for c, sizes in self._numbers.items()},
            **({"spent": self._spent} if self._spent else {}),
        }

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """By client, then stage and name, so that equal runs give equal lists. What a client has spent of its privacy
        is listed with its value."""
        return {client: self._rows(client) for client in sorted(self._arrays.keys() | self._numbers.keys())}

    def _rows(self, client: str) -> list[dict[str, Any]]:
        totals: dict[_Array, tuple[int, int]] = {}
        for rows, count in self._arrays.get(client, {}).items():
            for row in rows:
                size = prod(row[2]) * getattr(torch, row[3]).itemsize
                totals[row] = size, totals.get(row, (0, 0))[1] + count
        for (stage, name, kind), value in self._numbers.get(client, {}).items():
            totals[(stage, name, (), kind)] = value
        spent = {EPSILON: {"value": self._spent[client]}} if client in self._spent else {}
        return [
            {
                "stage": stage,
                "name": name,
                "shape": list(shape),
                "dtype": dtype,
                "bytes": size,
                "count": count,
                **spent.get(name, {}),
            }
            for (stage, name, shape, dtype), (size, count) in sorted(totals.items())
        ]
