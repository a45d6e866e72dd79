"""How many records of each label, task or language every client has, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.data.federation import SPLITS, ClientData, Federation, Record


@dataclass(frozen=True)
class ClientCounts:
    """One client: its records by split, and in each split by kind."""

    client: str
    info: Mapping[str, str]
    sizes: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]

    def largest_share(self, split: str) -> float | None:
        """The share of its most frequent kind; None without records."""
        counts = self.counts[split]
        return max(counts.values()) / self.sizes[split] if counts else None


@dataclass(frozen=True)
class RecordCounts:
    """All clients, then all newcomers.

    kind       what records are counted by: label, task, language or records
    names      of the kinds, in order
    partition  the manifest's: rule, arguments, seed and SHA-256
    """

    federation: str
    version: str
    task: str
    kind: str
    names: tuple[str, ...]
    clients: tuple[ClientCounts, ...]
    newcomers: tuple[ClientCounts, ...]
    partition: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""

        def rows(clients: Sequence[ClientCounts]) -> list[dict[str, Any]]:
            return [
                {
                    "client": counted.client,
                    "info": dict(counted.info),
                    **counted.sizes,
                    "largest_share": counted.largest_share("train"),
                    "counts": {split: dict(counts) for split, counts in counted.counts.items()},
                }
                for counted in clients
            ]

        return {
            "name": self.federation,
            "version": self.version,
            "task": self.task,
            "kind": self.kind,
            "names": list(self.names),
            "partition": dict(self.partition),
            "clients": rows(self.clients),
            "newcomers": rows(self.newcomers),
        }


def count_records(federation: Federation) -> RecordCounts:
    """Count every client's records by their label; those without by their task, else by their language."""
    kind = "label" if federation.label_names else kind_of([*federation.clients, *federation.newcomers])

    def name_of(record: Record) -> str:
        if kind == "label":
            return federation.label_names[record["label"]]
        return str(record[kind]) if kind != "records" else "records"

    def counts_of(client: ClientData) -> ClientCounts:
        counts = {split: dict(Counter(map(name_of, getattr(client, split)))) for split in SPLITS}
        return ClientCounts(client.id, dict(client.info), client.sizes, counts)

    clients, newcomers = (tuple(map(counts_of, some)) for some in (federation.clients, federation.newcomers))
    if kind == "label":
        names = federation.label_names
    else:
        seen = (name for client in (*clients, *newcomers) for counts in client.counts.values() for name in counts)
        names = tuple(dict.fromkeys(seen))
    return RecordCounts(
        federation.name,
        federation.version,
        federation.task,
        kind,
        tuple(names),
        clients,
        newcomers,
        federation.manifest.get("partition", {}),
    )


def kind_of(clients: Sequence[ClientData]) -> str:
    """The first field that every record has; else `records`: then only their number is counted."""
    records = [record for client in clients for split in SPLITS for record in getattr(client, split)]
    return next((field for field in ("task", "language") if records and all(r.get(field) for r in records)), "records")
