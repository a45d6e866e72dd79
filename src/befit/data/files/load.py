"""A federation from the user's own files: who the clients are, their splits, labels and a fingerprint of it all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from befit.core.errors import ConfigError, DataError, map_all
from befit.core.names import id_problems
from befit.data.federation import SPLITS, ClientData, Federation
from befit.data.files.client_files import ALL, Sources, client_sources
from befit.data.files.readers import read_rows
from befit.data.partition import generator
from befit.data.records import Item, check_columns, classes_of, column_names, items_of, label_of
from befit.tasks import get_task

logger = logging.getLogger(__name__)

PUBLIC = "public records"  # a key beside the clients' ids
Splits = dict[str, list[Item]]


def load_files(
    clients: str | Path | Mapping[str, str | Path | Mapping[str, str | Path]],
    *,
    task: str,
    columns: Mapping[str, str] | None = None,
    label_names: Sequence[str] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    seed: int = 0,
    newcomers: str | Path | Mapping[str, str | Path | Mapping[str, str | Path]] | None = None,
    public: str | Path | None = None,
    by: str | None = None,
) -> Federation:
    """Read every client's records; see `client_sources` for where they may lie and `read_rows` for how.

    task           text-classification (text, perhaps text_pair, label), image-classification (image, label),
                   causal-lm (instruction, perhaps input, output; or a form of `befit.tasks.lm_records`; where columns
                   name them also choices and references) or vqa (images, conversation, and more: see
                   `befit.tasks.vqa_records`)
    columns        field to the column's name in the files, where it differs
    label_names    names of the classes in order; None collects them from all training files
    val_fraction   share of the training records held out where a client has no validation file; 0 holds out none
    test_fraction  share of them held out before, where a client has no test file; 0 holds out none
    seed           of what is held out
    newcomers      where the records of clients lie that take no part in training; a test split alone is enough
    public         a file, or a folder of one client's form, of records that server and all clients may see
    by             a further column to keep in every record that has it (`evaluate.by`)

    A relative image path counts from the folder of the client's file. What is held out depends on the seed, the
    client's id and the order of its records only; each class (or task) gives its share where it has enough records.
    Raises DataError that names client, file and line, or ConfigError for the settings themselves.
    """
    columns = dict(columns or {})
    check_columns(task, columns)
    classification = get_task(task).has_classes
    if label_names is not None and not classification:
        raise ConfigError([f"data.label_names: {task} has no classes"])
    if not (0 <= val_fraction < 1 and 0 <= test_fraction < 1):
        got = f"{val_fraction} and {test_fraction}"
        raise ConfigError([f"data.val_fraction and test_fraction: must be at least 0 and below 1, got {got}"])
    sources = client_sources(clients)
    arriving = {} if newcomers is None else client_sources(newcomers, trains=False)
    _check_apart(sources, arriving)
    everybody = {**sources, **arriving}
    shared = {} if public is None else _public_sources(public, everybody)
    read = dict(map_all(lambda entry: (entry[0], _read(*entry, task, columns, by)), everybody.items()))
    public_items = _read_public(shared, task, columns)
    names: tuple[str, ...] = ()
    if classification:
        training = (item for client in sources for item in read[client]["train"])
        names, classes = classes_of(label_names, training)
        labelled = {**read, PUBLIC: {"train": public_items}}
        map_all(lambda entry: _resolve(*entry, names, classes, label_names is not None), labelled.items())
    carved = {client: _carve(client, splits, val_fraction, test_fraction, seed) for client, splits in read.items()}
    _warn_of_repeats(read)
    members = tuple(_client(client, splits) for client, splits in read.items())
    manifest = {
        "sources": [
            {"id": client, "split": split, "file": path.name}
            for client, splits in {**everybody, **({PUBLIC: shared} if shared else {})}.items()
            for split, paths in splits.items()
            for path in paths
        ],
        "partition": {
            "name": "files",
            "args": {"val_fraction": val_fraction, "test_fraction": test_fraction},
            "seed": seed,
            "held_out": carved,
            "sha256": _fingerprint({**read, PUBLIC: {"train": public_items}} if public_items else read),
        },
        "counts": {client.id: client.sizes for client in members},
    }
    return Federation(
        "files",
        "1",
        task,
        members[: len(sources)],
        names,
        members[len(sources) :],
        tuple(item.record for item in public_items),
        manifest,
    )


def _public_sources(public: str | Path, everybody: Mapping[str, Sources]) -> Sources:
    """The files of public records. Raises DataError where there are none, or where they are a client's."""
    try:
        (public_sources,) = client_sources({"public": public}).values()
    except DataError as error:
        raise DataError(f"data.public: {str(error).removeprefix('client public: ')}") from error
    owners = {path.resolve(): name for name, splits in everybody.items() for paths in splits.values() for path in paths}
    for path in chain.from_iterable(public_sources.values()):
        if (owner := owners.get(path.resolve())) is not None:
            raise DataError(f"data.public: {path} is client {owner}'s, and public records are for everybody to see")
    return public_sources


def _read_public(sources: Sources, task: str, columns: Mapping[str, str]) -> list[Item]:
    """The public records of all splits."""
    try:
        return [item for items in _read("public", sources, task, columns).values() for item in items]
    except DataError as error:
        raise DataError(f"data.public: {str(error).removeprefix('client public: ')}") from error


def _check_apart(clients: Mapping[str, Sources], newcomers: Mapping[str, Sources]) -> None:
    """Raise DataError for a newcomer that is a client, by its id or by its files."""
    owners = {path.resolve(): name for name, splits in clients.items() for paths in splits.values() for path in paths}
    problems = id_problems([*clients, *newcomers])
    problems += [f"newcomer {name}: there is a client of this name" for name in newcomers if name in clients]
    if PUBLIC in clients or PUBLIC in newcomers:
        problems.append(f"client {PUBLIC}: this is what befit calls the records of data.public; rename it")
    problems += [
        f"newcomer {name}: {path} is client {owners[path.resolve()]}'s"
        for name, splits in newcomers.items()
        for path in (path for paths in splits.values() for path in paths)
        if path.resolve() in owners
    ]
    if problems:
        raise DataError("; ".join(problems[:5]) + ("; …" if len(problems) > 5 else ""))


def _read(client: str, sources: Sources, task: str, columns: Mapping[str, str], by: str | None = None) -> Splits:
    """All of a client's items, split as its files are; what is in one file is training data until it is carved."""
    names = {*column_names(task, columns).values(), *[by] * (by is not None)}
    splits: Splits = {"train": []}
    try:
        for split, paths in sources.items():
            rows = [row for path in paths for row in read_rows(path, names)]
            splits["train" if split == ALL else split] = items_of(rows, task, columns, by)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    return splits


def _resolve(client: str, splits: Splits, names: Sequence[str], classes: Mapping[str | int, int], given: bool) -> None:
    def resolve(item: Item) -> None:
        item.record["label"] = label_of(item, names, classes, given)

    try:
        map_all(resolve, chain.from_iterable(splits.values()))
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error


def _carve(client: str, splits: Splits, val_fraction: float, test_fraction: float, seed: int) -> list[str]:
    """Hold out the splits that the client has no file for, test first; returns their names."""
    carved = []
    for split, fraction in (("test", test_fraction), ("val", val_fraction)):
        if split in splits or fraction == 0 or not splits["train"]:
            continue
        items = splits["train"]
        count = max(1, int(fraction * len(items) + 0.5))
        if count >= len(items):
            raise DataError(
                f"client {client}: {len(items)} training records are too few to hold out {count} for {split}. Give it "
                f"more, a {split} file, or set data.{split}_fraction: 0"
            )
        labels = [item.record.get("label", item.record.get("task")) for item in items]
        out = set(held_out(labels, count, generator(seed, "files", f"{client}/{split}")))
        splits[split] = [item for index, item in enumerate(items) if index in out]
        splits["train"] = [item for index, item in enumerate(items) if index not in out]
        carved.append(split)
    return carved


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


def _client(client: str, splits: Splits) -> ClientData:
    train, val, test = (tuple(item.record for item in splits.get(split, ())) for split in SPLITS)
    return ClientData(client, train, val, test)


def _warn_of_repeats(read: Mapping[str, Splits]) -> None:
    """Warn of test records that their own client also trains on, since they make its score too good."""
    repeats = {}
    for client, splits in read.items():
        trained = {item.digest for item in splits["train"]}
        repeats[client] = sum(item.digest in trained for item in splits.get("test", ()))
    affected = {client: count for client, count in repeats.items() if count}
    if affected:
        worst = max(affected, key=lambda client: affected[client])
        logger.warning(
            "%d test records are also in their client's training data (most: %d of client %s); remove duplicates "
            "from the files for a fair score",
            sum(affected.values()),
            affected[worst],
            worst,
        )


def _fingerprint(read: Mapping[str, Splits]) -> str:
    """SHA-256 of which client holds what in which split, in order. The folder the files lie in does not count."""
    digest = hashlib.sha256()
    for client, splits in read.items():
        for split in SPLITS:
            for item in splits.get(split, ()):
                digest.update(f"{client}/{split}/{item.record['id']}/{item.digest}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()
