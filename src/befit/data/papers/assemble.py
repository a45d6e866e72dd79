"""What the papers' benchmarks share: rows in an order of their own, and a federation with its manifest."""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from befit.core.errors import DataError
from befit.data.federation import SPLITS, ClientData, Federation, Record
from befit.data.files.readers import Row
from befit.data.papers.source import Place, Source
from befit.data.partition import generator
from befit.data.registry import get

_LOG = logging.getLogger(__name__)
Value = TypeVar("Value")


def digest(values: Any) -> str:
    """SHA-256 of the canonical JSON; bytes count by their own SHA-256."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        raise DataError(f"{type(value).__name__} cannot be part of a record's hash")

    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


def content_hash(digests: Sequence[str]) -> str:
    """Value hash of many records, the same in whatever order they came."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def ordered(rows: Sequence[Row], fields: Sequence[str]) -> tuple[list[Row], str]:
    """Rows sorted by the SHA-256 of their `fields`, so that the order of files does not matter; and the hash of all."""
    keyed = sorted(((digest({field: row.values[field] for field in fields}), row) for row in rows), key=lambda o: o[0])
    return [row for _, row in keyed], content_hash([key for key, _ in keyed])


def shuffled(values: Sequence[Value], seed: int, federation: str, stage: str) -> list[Value]:
    """The values in random order, drawn from the generator of this purpose."""
    return [values[index] for index in generator(seed, federation, stage).permutation(len(values))]


def source_entry(place: Place, source: Source, split: str, rows: int, sha256: str) -> dict[str, Any]:
    """The manifest's line about what was read."""
    return {
        "id": source.id,
        "config": source.config,
        "split": split,
        "rows": rows,
        "sha256": sha256,
        "from": f"hub, revision {place.revision(source)}" if place.hub else "files",
        "licence": source.licence,
    }


def same_text(text: str) -> str:
    """Text as repeats are found: NFKC, case folded, white space as one blank.

    >>> same_text(" Caf\\u00e9\\n X") == same_text("cafe\\u0301 x")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def assemble(
    name: str,
    clients: Sequence[ClientData],
    *,
    partition: str,
    arguments: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    newcomers: Sequence[ClientData] = (),
    label_names: Sequence[str] = (),
    public: Sequence[Record] = (),
    notes: Mapping[str, Any] | None = None,
) -> Federation:
    """The federation of a registered benchmark, with counts, a hash and a warning of test records that are trained on.

    partition  name of the rule that made the clients
    arguments  of the benchmark, its seed among them, without where the data was
    notes      further lines of the manifest
    """
    everybody = [*clients, *newcomers]
    if repeated := len(everybody) - len({client.id for client in everybody}):
        raise DataError(f"{name}: {repeated} ids of clients are there twice")
    hashed = hashlib.sha256()
    trained: set[str] = set()
    tested: list[str] = []
    for client in everybody:
        for split in SPLITS:
            for record in getattr(client, split):
                hashed.update(f"{client.id}/{split}/{record['id']}\n".encode())
                if split == "test":
                    tested.append(identity(record))
                else:
                    trained.add(identity(record))
    leaked = _counted(name, tested, trained, "in somebody's training data, as its sources have them")
    shown = _counted(name, tested, {identity(record) for record in public}, "among the public records")
    manifest = {
        "sources": [dict(source) for source in sources],
        "partition": {
            "name": partition,
            "args": dict(arguments),
            "seed": arguments["seed"],
            "sha256": hashed.hexdigest(),
        },
        "counts": {client.id: client.sizes for client in everybody},
        "test_records_in_training": leaked,
        **({"test_records_in_public": shown} if public else {}),
        **(notes or {}),
    }
    entry = get(name)
    members = (tuple(clients), tuple(label_names), tuple(newcomers), tuple(public))
    return Federation(name, entry.version, entry.task, *members, manifest)


def _counted(name: str, tested: Sequence[str], known: Collection[str], where: str) -> int:
    """How many of the tested records are known; some are warned of."""
    count = sum(key in known for key in tested)
    if count:
        _LOG.warning("%s: %d of %d test records are also %s; the manifest counts them", name, count, len(tested), where)
    return count


def identity(record: Record) -> str:
    """What a record asks, for finding repeats: its texts without regard to case, or its image."""
    if "image" in record:
        image = record["image"]
        content = image if isinstance(image, (bytes, str)) else image.tobytes()
        return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()
    if "conversation" in record:
        images = [image if isinstance(image, str) else hashlib.sha256(image).hexdigest() for image in record["images"]]
        return digest([images, *(same_text(turn["content"]) for turn in record["conversation"])])
    texts = [record.get(field) for field in ("text", "text_pair", "instruction", "input") if record.get(field)]
    return digest([same_text(str(text)) for text in texts])
