"""What is allowed in a user's files and probably a mistake, in sentences."""

from __future__ import annotations

import filecmp
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from befit.data.files.records import Item

_SHARED = 0.05  # of the smaller client's records: fewer may be short answers that many people give
_COMPARED = 20  # pictures of two clients whose files are compared byte by byte


def alike(names: Sequence[str], given: bool) -> list[str]:
    """Classes whose names differ by case or blanks alone.

    given  whether `data.label_names` lists them

    >>> alike(["Flu", "cold", "flu "], False)[0][:58]
    "the classes 'Flu' and 'flu ' differ by case or blanks only"
    """
    same: dict[str, list[str]] = defaultdict(list)
    for name in names:
        same[" ".join(name.casefold().split())].append(name)
    mend = f"if they are one, write them alike in the files{' and once in data.label_names' * given}"
    return [
        f"the classes {' and '.join(map(repr, those))} differ by case or blanks only; {mend}"
        for those in same.values()
        if len(those) > 1
    ]


def shared_records(read: Mapping[str, Mapping[str, Sequence[Item]]]) -> list[str]:
    """That clients hold the same records, by the pair that has the most in common."""
    by_client = {
        client: {item.digest: item for items in splits.values() for item in items} for client, splits in read.items()
    }
    owners: dict[str, list[str]] = defaultdict(list)
    for client, items in by_client.items():
        for digest in items:
            owners[digest].append(client)
    common: dict[tuple[str, str], list[str]] = defaultdict(list)
    for digest, clients in owners.items():
        for pair in combinations(clients, 2):
            common[pair].append(digest)
    many = {
        pair: len(digests)
        for pair, digests in common.items()
        if len(digests) >= _SHARED * min(len(by_client[client]) for client in pair)
        and any(_same_picture(*(by_client[client][digest] for client in pair)) for digest in digests[:_COMPARED])
    }
    if not many:
        return []
    (first, second), count = max(many.items(), key=lambda entry: entry[1])
    more = f", and {len(many) - 1} more pairs of clients share some" if len(many) > 1 else ""
    return [
        f"clients {first} and {second} have {count} records in common{more}: what one trains on may be what the other "
        "is measured on"
    ]


def _same_picture(first: Item, second: Item) -> bool:
    """False for two pictures of one name and size that differ; records without pictures are told apart before."""
    places = [item.record.get("image") for item in (first, second)]
    return not all(isinstance(place, str) for place in places) or filecmp.cmp(*map(str, places), shallow=False)
