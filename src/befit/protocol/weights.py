"""How much a client counts in a mean, which is what it says of its number of examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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


def dominating(counts: Mapping[str, int]) -> str | None:
    """A sentence about the client that says it has more than half of all examples, if there is one among three or more.

    >>> dominating({"a": 30, "b": 5, "c": 5})
    'client a says it has 30 of all 40 training examples: a mean by examples is then mostly its own'
    """
    total = sum(counts.values())
    for client, count in counts.items():
        if len(counts) > 2 and 2 * count > total:
            return (
                f"client {client} says it has {count} of all {total} training examples: a mean by examples is then "
                "mostly its own"
            )
    return None
