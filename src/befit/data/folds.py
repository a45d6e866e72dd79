"""Cross-validation: what a client holds out for validation, in parts that take turns."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from befit.core.errors import ConfigError
from befit.data.federation import GROUP, ClientData, Federation
from befit.data.held_out import held_out_groups, image_keys
from befit.data.partition import generator

Record = Mapping[str, Any]


def folds_of(client: ClientData, seed: int) -> int:
    """How many parts of about the size of its validation examples a client's training and validation examples have:
    one where it has none of the latter. Records of a group, such as a patient, or with an image in common, are in one
    part, or a picture would be in training and held out at once.

    >>> folds_of(ClientData("north", train=[{}] * 30, val=[{}] * 15), 0), folds_of(ClientData("south", [{}] * 30), 0)
    (3, 1)
    """
    return 1 + len(_parts(client, seed))


def folded(federation: Federation, fold: int, seed: int) -> Federation:
    """The federation with another part of every client's examples held out for validation; 0: as it is.

    Each part of the training examples has as many as the validation examples that it replaces, drawn by the seed, every
    class or task by its share; with groups or shared images, about as many, regardless of classes. No example is in
    two parts, and test examples stay. A client without validation examples keeps all it has for training. Raises
    ConfigError where a client has no such part, or none has validation examples.
    """
    if fold == 0:
        return federation
    if not any(client.val for client in federation.clients):
        raise ConfigError([f"evaluate.fold: {fold}, and no client has validation examples; set it to 0"])
    clients = tuple(_with(client, fold, seed) if client.val else client for client in federation.clients)
    return replace(federation, clients=clients, manifest={**federation.manifest, "fold": fold})


def without_part(client: ClientData, number: int, of: int, seed: int) -> ClientData:
    """The client with part `number`, from 1, of `of` parts of its training examples held out for validation, in place
    of the validation examples that it may have.

    Parts are as equal as can be, drawn by the seed, and have every class or task by its share. With groups or shared
    images they are of whole groups, regardless of classes. Raises ConfigError where there are fewer examples, or
    groups, than parts.
    """
    part = set(_equal_parts(client, of, seed)[number - 1])
    return replace(client, train=_at(client.train, part, False), val=_at(client.train, part, True))


def too_few_to_part(client: ClientData, of: int) -> str:
    """Why the training examples of a client cannot be in so many parts; empty where they can."""
    count = groups = len(client.train)
    if count >= of:
        groups = len(set(_belongings(replace(client, val=()))))
    if groups >= of:
        return ""
    together = f" in {groups} groups, by group or image" if groups < count else ""
    return f"client {client.id} has {count} training examples{together}, too few for {of} parts"


def folds_sentence(client: ClientData, seed: int) -> str:
    """How many folds a client has, and by what."""
    count, sizes = folds_of(client, seed), f"its {len(client.train)} training and {len(client.val)} validation examples"
    together = ", of which those with one group or image stay together" if _any_together(_belongings(client)) else ""
    return f"client {client.id} has {count} {'fold' if count == 1 else 'folds'}, by {sizes}{together}"


def _with(client: ClientData, fold: int, seed: int) -> ClientData:
    parts = _parts(client, seed)
    if len(parts) < fold:
        raise ConfigError([f"evaluate.fold: {fold}, counted from 0; {folds_sentence(client, seed)}"])
    part = parts[fold - 1]
    return replace(
        client,
        train=[*_at(client.train, part, False), *client.val],  # so that tasks stay in the order of a stream
        val=_at(client.train, part, True),
    )


def _parts(client: ClientData, seed: int) -> list[set[int]]:
    """Places of the training examples that are held out in each fold but the first."""
    size, rng = len(client.val), generator(seed, "folds", client.id)
    if not size:
        return []
    together = _belongings(client)
    if _any_together(together):
        return list(_whole_groups(together[: len(client.train)], set(together[len(client.train) :]), size, rng))
    parts, in_turn = len(client.train) // size, _in_turn(client.train, rng)
    even = [in_turn[number * len(in_turn) // (parts * size)] for number in range(parts * size)]
    return [set(even[start::parts]) for start in range(parts)]


def _equal_parts(client: ClientData, of: int, seed: int) -> list[list[int]]:
    """Places of the training examples in each part."""
    if problem := too_few_to_part(client, of):
        raise ConfigError([problem])
    groups, rng = _belongings(replace(client, val=())), generator(seed, "parts", client.id)
    if not _any_together(groups):
        in_turn = _in_turn(client.train, rng)
        return [in_turn[start::of] for start in range(of)]
    parts: list[list[int]] = [[] for _ in range(of)]
    members: dict[int, list[int]] = {}
    for place in rng.permutation(len(groups)).tolist():
        members.setdefault(groups[place], []).append(place)
    for places in sorted(members.values(), key=len, reverse=True):  # the largest first, so that parts become equal
        min(parts, key=len).extend(places)
    return parts


def _in_turn(records: Sequence[Record], rng: np.random.Generator) -> list[int]:
    """All places, class after class, at random within a class."""
    drawn: list[int] = rng.permutation(len(records)).tolist()
    return sorted(drawn, key=lambda place: _kind(records[place]))  # stable


def _whole_groups(groups: list[int], kept: set[int], size: int, rng: np.random.Generator) -> Iterator[set[int]]:
    """Parts of whole groups, each of half to twice as many as `size`, as long as there are some."""
    left = [place for place, group in enumerate(groups) if group not in kept]
    while left:
        drawn = held_out_groups([groups[place] for place in left], size, rng)  # never the last group
        part = {left[at] for at in drawn} if 2 * len(left) > 3 * size else set(left)
        if not size <= 2 * len(part) <= 4 * size:
            return
        yield part
        left = [place for place in left if place not in part]


def _belongings(client: ClientData) -> list[int]:
    """For each training example, then each validation example, a number that it has in common with those of its group
    and those that have an image of its own, and with theirs in turn."""
    from scipy.sparse import coo_array  # here, since only cross-validation needs it
    from scipy.sparse.csgraph import connected_components

    records, keys = (*client.train, *client.val), dict[Hashable, int]()
    pairs = [(at, len(records) + keys.setdefault(key, len(keys))) for at, of in enumerate(records) for key in _keys(of)]
    if not pairs:
        return list(range(len(records)))
    nodes = len(records) + len(keys)
    graph = coo_array((np.ones(len(pairs)), tuple(np.transpose(pairs))), shape=(nodes, nodes))
    return connected_components(graph, directed=False)[1][: len(records)].tolist()


def _any_together(numbers: Sequence[int]) -> bool:
    return len(set(numbers)) < len(numbers)


def _keys(record: Record) -> Iterator[Hashable]:
    """What a record may have in common with others: its group and its images."""
    if GROUP in record:
        yield GROUP, record[GROUP]
    yield from image_keys(record)


def _at(records: Sequence[Record], places: set[int], inside: bool) -> list[Record]:
    return [record for place, record in enumerate(records) if (place in places) == inside]


def _kind(record: Record) -> str:
    return str(record.get("label", record.get("task", "")))
