"""What is allowed in a user's files and probably a mistake, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from befit.data.records import Item

_SHARED = 0.05  # of the smaller client's records: fewer may be short answers that many people give


def alike(names: Sequence[str], given: bool) -> list[str]:
    """Classes whose names differ by case or blanks alone.

    given  whether `data.label_names` lists them

    >>> alike(["Flu", "cold", "flu "], False)[0][:57]
    "the classes 'Flu' and 'flu ' differ by case or blanks only"
    """
    same: dict[str, list[str]] = defaultdict(list)
    for name in names:
        same[" ".join(name.casefold().split())].append(name)
    mend = "correct data.label_names" if given else "write them alike in the files if they are one"
    return [
        f"the classes {' and '.join(map(repr, those))} differ by case or blanks only; {mend}"
        for those in same.values()
        if len(those) > 1
    ]


def shared_records(read: Mapping[str, Mapping[str, Sequence[Item]]]) -> list[str]:
    """Pairs of clients that hold the same records, the ones with the most in common first."""
    held = {client: {item.digest for items in splits.values() for item in items} for client, splits in read.items()}
    owners: dict[str, list[str]] = defaultdict(list)
    for client, digests in held.items():
        for digest in digests:
            owners[digest].append(client)
    common: dict[tuple[str, str], int] = defaultdict(int)
    for clients in owners.values():
        for pair in combinations(clients, 2):
            common[pair] += 1
    many = {
        pair: count for pair, count in common.items() if count >= _SHARED * min(len(held[client]) for client in pair)
    }
    if not many:
        return []
    (one, other), count = max(many.items(), key=lambda entry: entry[1])
    more = f", and {len(many) - 1} more pairs of clients share some" if len(many) > 1 else ""
    return [
        f"clients {one} and {other} have {count} records in common{more}: one's training data may be the other's test "
        "(pictures count as the same by name and size)"
    ]
