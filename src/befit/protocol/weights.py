"""How much a client counts in a mean, which is what it says of its number of examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from befit.core.values import Update


def weighed(updates: Sequence[Update], share: float | None) -> list[Update]:
    """Updates in the same order, of whose examples no client has more than this share of those of its backbone: a mean
    is of clients of one backbone."""
    families: dict[str, list[int]] = {}
    for place, update in enumerate(updates):
        families.setdefault(update.client.backbone, []).append(place)
    found = list(updates)
    for places in families.values():
        counts = capped([updates[place].client.num_examples for place in places], share)
        for place, count in zip(places, counts, strict=True):
            found[place] = replace(updates[place], client=replace(updates[place].client, num_examples=count))
    return found


def capped(counts: Sequence[int], share: float | None) -> list[int]:
    """Numbers of examples, the largest lowered until no client has more than this share of their sum.

    Where the share is too small for that, all are lowered to the smallest that is not zero. None changes nothing.

    >>> capped([900, 50, 50], 0.5), capped([10, 10, 10], 0.2), capped([900, 50, 50], None)
    ([100, 50, 50], [10, 10, 10], [900, 50, 50])
    """
    if share is None or not any(counts):
        return list(counts)
    least = min(count for count in counts if count)

    def fits(most: int) -> bool:
        return most <= share * sum(min(count, most) for count in counts)

    low, high = (
        least,
        max(counts),
    )  # the sum grows more slowly than its largest part, so what fits is below what does not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return [min(count, low) for count in counts]


def dominating(counts: Mapping[str, int], families: Mapping[str, str]) -> list[str]:
    """A sentence about each client that says it has more than half of the examples of its backbone's clients, where
    there are three or more: a mean is of clients of one backbone.

    families  by client, the name of its backbone

    >>> dominating({"a": 30, "b": 5, "c": 5}, {})
    ['client a says it has 30 of all 40 training examples, so a mean by examples is mostly its model']
    """
    sentences: list[str] = []
    several = len({*families.values()}) > 1
    for family in dict.fromkeys(families.get(client, "") for client in counts):
        own = {client: count for client, count in counts.items() if families.get(client, "") == family}
        total = sum(own.values())
        sentences += [
            f"client {client} says it has {count} of all {total} training examples"
            f"{f' of clients with the model {family}' if several else ''}, so a mean by examples is mostly its model"
            for client, count in own.items()
            if len(own) > 2 and 2 * count > total
        ]
    return sentences
