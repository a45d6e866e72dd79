"""What is allowed in a user's files and probably a mistake, in sentences."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from befit.data.files.records import Item, as_read, plainly
from befit.data.held_out import image_keys

_SHARED = 0.05  # of the smaller client's records: fewer may be short answers that many people give
_EVERYBODYS = 20  # clients with one record, beyond which it is not counted pair by pair


def alike(names: Sequence[str], given: bool) -> list[str]:
    """Classes whose names differ by case, blanks, the form of Unicode or how a whole number is written.

    given  whether `data.label_names` lists them

    >>> alike(["Flu", "cold", "flu "], False)[0][:58]
    "the classes 'Flu' and 'flu ' differ by case or blanks only"
    >>> alike(["gr\\u00fcn", "rot", "gru\\u0308n"], False)[0][:88]
    "the classes 'gr\\\\xfcn' and 'gru\\\\u0308n' differ by how letters are encoded in Unicode only"
    """
    same: dict[str, list[str]] = defaultdict(list)
    for name in names:
        whole = re.sub(r"^(-?\d+)\.0+$", r"\1", name.strip())  # as a table with gaps writes whole numbers
        same[as_read(whole)].append(name)

    def difference(those: Sequence[str]) -> str:
        if len(set(map(plainly, those))) == 1:
            shown, how = map(repr, those), "case or blanks"
        elif len(set(map(as_read, those))) == 1:  # they look the same, so by their code points
            shown, how = map(ascii, those), "how letters are encoded in Unicode"
        else:
            shown, how = map(repr, those), "how a number is written"
        return f"the classes {' and '.join(shown)} differ by {how} only"

    mend = f"if they are one, write them alike in the files{' and once in data.label_names' * given}"
    return [f"{difference(those)}; {mend}" for those in same.values() if len(those) > 1]


def never_trained(read: Mapping[str, Mapping[str, Sequence[Item]]], names: Sequence[str]) -> list[str]:
    """Classes that held-out records have and no training record has, of which nothing can be learnt."""
    if not names:
        return []
    found = {split: set[int]() for split in ("train", "held out")}
    for splits in read.values():
        for split, items in splits.items():
            found["train" if split == "train" else "held out"] |= {item.record["label"] for item in items}
    absent = sorted(found["held out"] - found["train"])
    if not absent:
        return []
    return [
        f"no training record has the class {names[absent[0]]!r}{f' or {len(absent) - 1} more' if absent[1:] else ''}, "
        "which held-out records have: they are always counted as wrong"
    ]


def shared_records(read: Mapping[str, Mapping[str, Sequence[Item]]]) -> list[str]:
    """That clients hold the same records, by the pair that has the most in common."""
    by_client = {  # dictionaries, for their order
        client: dict.fromkeys(item.digest for items in splits.values() for item in items)
        for client, splits in read.items()
    }
    owners: dict[str, list[str]] = defaultdict(list)
    for client, digests in by_client.items():
        for digest in digests:
            owners[digest].append(client)
    common = Counter(
        pair for clients in owners.values() if len(clients) <= _EVERYBODYS for pair in combinations(clients, 2)
    )
    many = {
        pair: count
        for pair, count in common.items()
        if count >= _SHARED * min(len(by_client[client]) for client in pair)
    }
    if not many:
        return []
    (first, second), count = max(many.items(), key=lambda entry: entry[1])
    more = f", and {len(many) - 1} more pairs of clients share some" if len(many) > 1 else ""
    return [
        f"clients {first} and {second} have {count} records in common{more}: what one trains on may be what the other "
        "is measured on"
    ]


def tested_in_public(read: Mapping[str, Mapping[str, Sequence[Item]]], public: Sequence[Item]) -> list[str]:
    """That public records, on which the server trains too, are what clients are measured on."""
    known = {item.digest for item in public}
    tested = [item.digest in known for splits in read.values() for item in splits.get("test", ())]
    if not any(tested):
        return []
    return [f"{sum(tested)} of {len(tested)} test records are among the public ones, which may be trained on"]


def of_one_class(read: Mapping[str, Mapping[str, Sequence[Item]]], names: Sequence[str]) -> list[str]:
    """That clients train on records of one class only, by the first that does. `names` are those of the classes."""
    if len(names) < 2:
        return []
    classes = {client: {item.record["label"] for item in splits["train"]} for client, splits in read.items()}
    alone = {client: names[next(iter(found))] for client, found in classes.items() if len(found) == 1}
    if not alone:
        return []
    first = next(iter(alone))
    more = f" (and {len(alone) - 1} more on one each)" if len(alone) > 1 else ""
    return [
        f"client {first} trains on one class only, {alone[first]!r}{more}: such a client's score does not tell whether "
        "its model can tell classes apart"
    ]


def divided_images(read: Mapping[str, Mapping[str, Sequence[Item]]]) -> list[str]:
    """That questions about one image are in training and held out at one client, by the client with the most."""
    counts: dict[str, int] = {}
    for client, splits in read.items():
        images = {split: {key for item in items for key in image_keys(item.record)} for split, items in splits.items()}
        held_out = images.get("val", set()) | images.get("test", set())
        counts[client] = len(images["train"] & held_out)
    worst = max(counts, key=lambda client: counts[client])
    if not counts[worst]:
        return []
    return [
        f"{sum(counts.values())} images have questions both in training and in val or test of their client (most: "
        f"{counts[worst]} of client {worst}), which makes scores too good; a column that names the image as "
        "data.columns.group keeps its questions together"
    ]
