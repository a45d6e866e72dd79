"""What left each client, grouped so that ten clients that sent the same are listed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.report.numbers import plain
from befit.report.table import BYTES, Cell, Table

__all__ = ["OutboundGroup", "outbound_groups", "outbound_totals"]

_NUMBERS = ("int", "float", "str", "bool", "list")  # types of single values; their encoded length varies
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class OutboundGroup:
    """Clients that sent the same names, shapes and types equally often, and what that was."""

    clients: tuple[str, ...]
    table: Table


def outbound_totals(outbound: Mapping[str, Sequence[Entry]]) -> Table:
    """By stage: how many arrays and single values left how many clients, and their bytes over all clients.

    Single values are counted with the longest encoding that occurred, so that their bytes are an upper bound.
    """
    stages: dict[str, dict[str, Any]] = {}
    for client, entries in outbound.items():
        for entry in entries:
            stage = stages.setdefault(entry["stage"], {"clients": set(), "arrays": set(), "values": set(), "bytes": 0})
            stage["clients"].add(client)
            stage["values" if _is_value(entry) else "arrays"].add(entry["name"])
            stage["bytes"] += entry["bytes"] * entry["count"]
    rows = [
        [name, *(len(stage[key]) for key in ("clients", "arrays", "values")), Cell(stage["bytes"], BYTES)]
        for name, stage in stages.items()
    ]
    headers = ["stage", "clients", "different arrays", "different values", "total, all clients"]
    return Table("What left the clients, by stage", headers, rows)


def outbound_groups(outbound: Mapping[str, Sequence[Entry]]) -> list[OutboundGroup]:
    """The full list, once for all clients that share it; the largest group first."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for client, entries in outbound.items():
        groups.setdefault(tuple(map(_identity, entries)), []).append(client)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [
        OutboundGroup(tuple(map(plain, clients)), _table([outbound[client] for client in clients]))
        for clients in ordered
    ]


def _identity(entry: Entry) -> tuple[Any, ...]:
    size = None if _is_value(entry) else entry["bytes"]
    return entry["stage"], entry["name"], tuple(entry["shape"]), entry["dtype"], entry["count"], size


def _table(lists: Sequence[Sequence[Entry]]) -> Table:
    rows = []
    for same in zip(*lists, strict=True):  # one entry in the words of every client of the group
        entry = same[0]
        least, most = (bound(client_entry["bytes"] for client_entry in same) for bound in (min, max))
        shape = " \N{MULTIPLICATION SIGN} ".join(map(str, entry["shape"])) or (
            "one value" if _is_value(entry) else "scalar"
        )
        rows.append(
            [
                entry["stage"],
                entry["name"],
                shape,
                entry["dtype"],
                f"{least:,}" if least == most else f"{least:,} to {most:,}",
                f"{entry['count']:,}",
            ]
        )
    return Table(
        "Everything that left", ["stage", "name", "shape", "type", "bytes each time", "times"], rows, detail=True
    )


def _is_value(entry: Entry) -> bool:
    return not entry["shape"] and entry["dtype"] in _NUMBERS
