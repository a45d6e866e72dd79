"""Cross-validation: what a client holds out for validation, in parts that take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from befit.core.errors import ConfigError
from befit.data.federation import ClientData, Federation
from befit.data.partition import generator

Record = Mapping[str, Any]


def folds_of(client: ClientData) -> int:
    """How many parts of the size of its validation examples a client's training and validation examples have: one where
    it has none of the latter, or where records share an image, which would be in training and held out at once.

    >>> folds_of(ClientData("north", train=[{}] * 30, val=[{}] * 15)), folds_of(ClientData("south", train=[{}] * 30))
    (3, 1)
    """
    if not client.val or _share_images([*client.train, *client.val]):
        return 1
    return 1 + len(client.train) // len(client.val)


def folded(federation: Federation, fold: int, seed: int) -> Federation:
    """The federation with another part of every client's examples held out for validation; 0: as it is.

    Each part of the training examples has as many as the validation examples that it replaces, drawn by the seed, every
    class or task by its share. No example is in two parts, and test examples stay. A client without validation examples
    keeps all it has for training. Raises ConfigError where a client has no such part, or none has validation examples.
    """
    if fold == 0:
        return federation
    measured = [client for client in federation.clients if client.val]
    if not measured:
        raise ConfigError([f"evaluate.fold: {fold}, and no client has validation examples; set it to 0"])
    if few := [client for client in measured if folds_of(client) <= fold]:
        raise ConfigError([f"evaluate.fold: {fold}, counted from 0; {folds_sentence(few[0])}"])
    clients = tuple(_with(client, fold, seed) if client.val else client for client in federation.clients)
    return replace(federation, clients=clients, manifest={**federation.manifest, "fold": fold})


def folds_sentence(client: ClientData) -> str:
    """How many folds a client has, and why not more."""
    count, sizes = folds_of(client), f"its {len(client.train)} training and {len(client.val)} validation examples"
    if count == 1 and client.val and len(client.train) >= len(client.val):
        return f"client {client.id} has 1 fold, as some of its records share an image"
    return f"client {client.id} has {count} {'fold' if count == 1 else 'folds'}, by {sizes}"


def _share_images(records: Sequence[Record]) -> bool:
    """Whether one image is in several records: by `source`, where a benchmark says which pictures it has altered, else
    by path or content."""
    images = [record.get("source") or record["images"] for record in records if "images" in record]
    known = [image for of_record in images for image in set(map(_identity, of_record))]
    return len(set(known)) < len(known)


def _identity(image: Any) -> str | bytes | int:
    """The same for one image in two records: a path, a number, or what it holds."""
    if isinstance(image, (str, bytes, int)):
        return image
    return str(image) if isinstance(image, PathLike) else np.asarray(image).tobytes()


def _with(client: ClientData, fold: int, seed: int) -> ClientData:
    drawn = generator(seed, "folds", client.id).permutation(len(client.train)).tolist()
    in_turn = sorted(drawn, key=lambda place: _kind(client.train[place]))  # stable: at random within a class
    parts, size = folds_of(client) - 1, len(client.val)
    even = [in_turn[number * len(in_turn) // (parts * size)] for number in range(parts * size)]
    held_out = set(even[fold - 1 :: parts])
    return replace(
        client,
        train=[*_at(client.train, held_out, False), *client.val],  # so that tasks stay in the order of a stream
        val=_at(client.train, held_out, True),
    )


def _at(records: Sequence[Record], places: set[int], inside: bool) -> list[Record]:
    return [record for place, record in enumerate(records) if (place in places) == inside]


def _kind(record: Record) -> str:
    return str(record.get("label", record.get("task", "")))
