"""Which records are held out: every class by its share, or whole groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np


def held_out(labels: Sequence[Any], count: int, rng: np.random.Generator) -> list[int]:
    """`count` indices at random, every label by its share (largest remainders), in ascending order.

    The last record of a label is taken only where `count` cannot be reached otherwise.

    >>> len(held_out("aaaaaaaabb", 5, np.random.default_rng(0)))
    5
    >>> sorted("aaaaaaaabb"[i] for i in held_out("aaaaaaaabb", 5, np.random.default_rng(0)))
    ['a', 'a', 'a', 'a', 'b']
    """
    members: dict[Any, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    groups = list(members.values())
    exact = [count * len(group) / len(labels) for group in groups]
    taken = [int(share) for share in exact]
    order = sorted(range(len(groups)), key=lambda at: (len(groups[at]) - taken[at] <= 1, taken[at] - exact[at]))
    for at in order[: count - sum(taken)]:
        taken[at] += 1
    chosen = (rng.permutation(group)[:size] for group, size in zip(groups, taken, strict=True))
    return sorted(int(index) for part in chosen for index in part)


def held_out_groups(groups: Sequence[Any], count: int, rng: np.random.Generator) -> list[int]:
    """Indices of the records of whole groups, drawn at random: each that brings their number closer to `count`, but
    never the last that is left; at least the smallest one.

    >>> held_out_groups("aabbbbcc", 2, np.random.default_rng(0)) in ([0, 1], [6, 7])
    True
    """
    sizes = Counter(groups)
    names, room = list(sizes), count
    chosen = set()
    for at in rng.permutation(len(names)):
        if sizes[names[at]] < 2 * room and len(chosen) < len(names) - 1:
            chosen.add(names[at])
            room -= sizes[names[at]]
    chosen = chosen or {min(names, key=lambda name: sizes[name])}
    return [index for index, group in enumerate(groups) if group in chosen]


def image_keys(record: Mapping[str, Any]) -> Iterator[Hashable]:
    """For each image that a record asks about, the same as in other records with it: a number in `source`, where a
    benchmark says which pictures it has altered, else the path or content."""
    if "images" in record:
        source = record.get("source")
        yield from map(_image_key, source if isinstance(source, list) else record["images"])


def _image_key(image: Any) -> Hashable:
    if isinstance(image, (str, bytes, int)):
        return image
    return str(image) if isinstance(image, PathLike) else np.asarray(image).tobytes()
