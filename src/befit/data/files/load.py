"""A federation from the user's own files: who the clients are, their splits, labels and a fingerprint of it all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from befit.core.errors import ConfigError, DataError, map_all
from befit.core.names import id_problems
from befit.core.seeds import derive_seed
from befit.core.text import PROGRESS, first_of, with_unit
from befit.data.federation import SPLITS, ClientData, Federation, Record
from befit.data.files.client_files import ALL, Sources, client_sources, columns_by_client
from befit.data.files.divide import Rows, divided
from befit.data.files.doubts import alike, divided_images, never_trained, of_one_class, shared_records, tested_in_public
from befit.data.files.hub import hub_rows
from befit.data.files.readers import read_rows
from befit.data.files.records import (
    APART,
    Item,
    check_columns,
    classes_of,
    column_names,
    is_missing,
    items_of,
    label_of,
    without_missing,
)
from befit.data.files.settings import DataSettings
from befit.data.held_out import held_out, held_out_groups
from befit.data.partition import generator
from befit.tasks import get_task

_LOG = logging.getLogger(__name__)
progress = logging.getLogger(PROGRESS)

_LARGE = 10 * 2**20  # bytes of a client's files from which on it is said that they are read
PUBLIC = "public records"  # keys beside the clients' ids
POOLED = "data.clients"
Splits = dict[str, list[Item]]


def load_files(
    settings: DataSettings, seed: int = 0, by: str | None = None, one_by_one: bool = False, secret: str = ""
) -> Federation:
    """Read every client's records; see `client_sources` for where they may lie and `read_rows` for how.

    settings    the block `data`; a client's own `columns` go before those of all. With a column for `group`, all
                records of a group are in one split of their client
    seed        of what is held out
    by          a further column to keep in every record that has it (`evaluate.by`)
    one_by_one  hold each record out by a draw from its own content, whatever others there are; for private training
    secret      what such draws depend on too, where sizes of splits are told to somebody who knows the seed

    A relative image path counts from the folder of the client's file. What is held out depends on the seed, the
    client's id and the order of its records only; without groups, each class (or task) gives its share where it has
    enough records.
    Raises DataError that names client, file and line, or ConfigError for the settings themselves.
    """
    task, label_names, columns = settings.task, settings.label_names, settings.columns
    by_client = columns_by_client(settings.clients, columns) | columns_by_client(settings.newcomers, columns)
    for fields in (columns, *by_client.values()):
        check_columns(task, fields)
    classification = get_task(task).has_classes
    if label_names is not None and not classification:
        raise ConfigError([f"data.label_names: {task} has no classes"])
    sources = _client_sources(settings)
    arriving = {} if settings.newcomers is None else client_sources(settings.newcomers, trains=False)
    _check_apart(sources, arriving)
    everybody = {**sources, **arriving}
    shared = {} if settings.public is None else _public_sources(settings.public, everybody)
    read = _read_clients(settings, everybody, arriving, by_client, seed, by)
    trained = [client for client in read if client not in arriving]
    public_items = _read_public(shared, task, columns, settings.missing == "drop")
    names: tuple[str, ...] = ()
    if classification:
        training = (item for client in trained for item in read[client]["train"])
        names, classes = classes_of(label_names, training)
        labelled = {**read, PUBLIC: {"train": public_items}}
        map_all(lambda entry: _resolve(*entry, names, classes, label_names is not None), labelled.items())
    if settings.drop_duplicates:
        read = {client: _without_repeats(client, splits) for client, splits in read.items()}
    carved = map_all(lambda entry: _carve(*entry, settings, seed, one_by_one, secret), read.items())
    held_out = dict(zip(read, carved, strict=True))
    _warn_of_repeats(read)
    doubts = (
        *alike(names, label_names is not None),
        *of_one_class({client: read[client] for client in trained}, names),
        *(never_trained(read, names) if len(trained) > 1 else ()),  # a site by itself does not know what others have
        *shared_records(read),
        *tested_in_public(read, public_items),
        *divided_images(read),
    )
    for doubt in doubts:
        _LOG.warning("%s", doubt)
    members = tuple(_client(client, splits) for client, splits in read.items())
    public_splits: dict[str, Splits] = {PUBLIC: {"train": public_items}} if public_items else {}
    manifest = {
        "sources": [
            {"id": client, "split": split, "file": path.name}
            for client, splits in {**everybody, **({PUBLIC: shared} if shared else {})}.items()
            for split, paths in splits.items()
            for path in paths
        ],
        "partition": {
            "name": "files",
            "args": _how_divided(settings),
            "seed": seed,
            "held_out": held_out,
            **_fingerprints({client: read[client] for client in trained}, read, public_splits),
        },
        "counts": {client.id: client.sizes for client in members},
    }
    return Federation(
        "files",
        "1",
        task,
        members[: len(trained)],
        names,
        members[len(trained) :],
        tuple(item.record for item in public_items),
        manifest,
    )


def _read_clients(
    settings: DataSettings,
    everybody: Mapping[str, Sources],
    arriving: Mapping[str, Sources],
    by_client: Mapping[str, Mapping[str, str]],
    seed: int,
    by: str | None,
) -> dict[str, Splits]:
    """By client, and then by newcomer, what its files hold, or what it is dealt of a table.

    everybody, arriving  the files of all, and of newcomers alone
    by_client            the columns of clients that have some of their own
    """
    task, columns, partition = settings.task, settings.columns, settings.partition

    def rows_of(client: str) -> Rows:
        owner = None if partition is None else partition.by
        names = {*column_names(task, by_client.get(client, columns)).values(), by, owner} - {None}
        if settings.hub is not None and client == POOLED:
            return hub_rows(str(settings.clients), settings.hub, names)
        return _rows(client, everybody[client], names)

    def items_in(client: str, rows: Rows) -> tuple[str, Splits]:
        fields = by_client.get(client, columns)
        return client, _items(client, rows, task, fields, by, settings.missing == "drop")

    if partition is None:
        return dict(map_all(lambda client: items_in(client, rows_of(client)), everybody))
    label, group, pool = columns.get("label", "label"), columns.get("group"), rows_of(POOLED)
    if partition.by is not None and settings.missing == "drop":
        pool = _of_somebody(pool, partition.by)
    pooled = divided(pool, partition, label, seed, arriving, group)
    read = dict(map_all(lambda entry: items_in(*entry), pooled.items()))
    return read | dict(map_all(lambda client: items_in(client, rows_of(client)), arriving))


def _of_somebody(rows: Rows, by: str) -> Rows:
    """The rows that name a client in this column; where they have none of this name, all."""
    kept = {
        split: [row for row in some if by not in row.fields or not is_missing(row.values.get(by))]
        for split, some in rows.items()
    }
    if left_out := sum(map(len, rows.values())) - sum(map(len, kept.values())):
        count = sum(map(len, rows.values()))
        if left_out == count:
            raise DataError(f"data.partition.by: none of the {count} records names a client in {by}")
        _LOG.warning("%d of %d records name no client in %s and are left out", left_out, count, by)
    return kept


def _client_sources(settings: DataSettings) -> Mapping[str, Sources]:
    """By client its files; of records that are divided among clients, all under one name."""
    if settings.hub is not None:
        return {POOLED: {}}
    if settings.partition is not None:
        return {POOLED: _sources_of(POOLED, settings.clients)}
    return client_sources(settings.clients)


def _how_divided(settings: DataSettings) -> dict[str, Any]:
    """What a manifest says of how the records came to their clients and splits."""
    said: dict[str, Any] = {"val_fraction": settings.val_fraction, "test_fraction": settings.test_fraction}
    if settings.partition is not None:
        said |= {key: value for key, value in asdict(settings.partition).items() if value is not None}
    if settings.hub is not None:
        said |= {"dataset": settings.clients, **asdict(settings.hub)}
    return said


def _fingerprints(
    trained: Mapping[str, Splits], everybody: Mapping[str, Splits], public: Mapping[str, Splits]
) -> dict[str, Any]:
    """Of all records, of those that models are trained with, and of each split of these clients."""
    return {
        "sha256": _fingerprint({**everybody, **public}),
        "clients_sha256": _fingerprint({**trained, **public}),
        "split_sha256": {
            split: _fingerprint({client: {split: splits.get(split, [])} for client, splits in trained.items()})
            for split in SPLITS
        },
    }


def load_records(
    files: Sequence[Path], task: str, columns: Mapping[str, str], label_names: Sequence[str], drop: bool
) -> list[dict[str, Any]]:
    """The records of these files, with labels as numbers of these classes; `drop` leaves out what lacks a field.

    Raises DataError that names file and line.
    """
    kept = {field: column for field, column in columns.items() if field not in APART}
    wanted, items = {*column_names(task, kept).values()}, list[Item]()
    for path in files:
        rows = read_rows(path, wanted)
        try:
            items += _items(path.name, {"test": rows}, task, kept, drop=drop)["test"]
        except DataError as error:
            raise DataError(str(error).replace(f"client {path.name}: ", "")) from error  # the file is nobody's
    if get_task(task).has_classes:
        names, classes = classes_of(label_names, ())
        map_all(lambda item: item.record.update(label=label_of(item, names, classes, True)), items)
    return [item.record for item in items]


def _sources_of(key: str, place: Any) -> Sources:
    """The files of one place that is no client's own, such as `data.public`."""
    try:
        (sources,) = client_sources({key: place}).values()
    except DataError as error:
        raise _about(key, error) from error
    return sources


def _about(key: str, error: DataError) -> DataError:
    return DataError(f"{key}: {str(error).removeprefix(f'client {key}: ')}")


def _public_sources(public: str | Path, everybody: Mapping[str, Sources]) -> Sources:
    """The files of public records. Raises DataError where there are none, or where they are a client's."""
    sources = _sources_of("data.public", public)
    owners = {path.resolve(): name for name, splits in everybody.items() for paths in splits.values() for path in paths}
    for path in chain.from_iterable(sources.values()):
        if (owner := owners.get(path.resolve())) is not None:
            raise DataError(f"data.public: {path} is client {owner}'s, and public records are for everybody to see")
    return sources


def load_public(settings: DataSettings) -> tuple[tuple[Record, ...], str]:
    """The public records alone, as `load_files` reads them, of data whose classes are listed (`label_names`), and the
    SHA-256 of all that is in them; empty where there are none.

    Raises DataError as `load_files` does.
    """
    if settings.public is None:
        return (), ""
    task, drop = settings.task, settings.missing == "drop"
    items = _read_public(_public_sources(settings.public, {}), task, settings.columns, drop)
    if get_task(task).has_classes:
        names, classes = classes_of(settings.label_names, ())
        _resolve(PUBLIC, {"train": items}, names, classes, True)
    return tuple(item.record for item in items), _fingerprint({PUBLIC: {"train": items}})


def _read_public(sources: Sources, task: str, columns: Mapping[str, str], drop: bool) -> list[Item]:
    """The public records of all splits; `drop` leaves out those that lack a value."""
    key = "data.public"
    kept = {field: column for field, column in columns.items() if field != "group"}  # nothing of them is held out
    try:
        rows = _rows(key, sources, {*column_names(task, kept).values()})
        return [item for items in _items(key, rows, task, kept, drop=drop).values() for item in items]
    except DataError as error:
        raise _about(key, error) from error


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
        raise DataError(first_of(problems, 5, "; "))


def _rows(client: str, sources: Sources, columns: Collection[str]) -> Rows:
    """All of a client's rows, split as its files are; what is in one file is training data until it is carved."""
    rows: Rows = {"train": []}
    try:
        if (size := sum(path.stat().st_size for paths in sources.values() for path in paths)) > _LARGE:
            progress.info("reading %s, %s …", client, with_unit(size, "B"))
        for split, paths in sources.items():
            rows["train" if split == ALL else split] = [row for path in paths for row in read_rows(path, columns)]
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    return rows


def _items(
    client: str, rows: Rows, task: str, columns: Mapping[str, str], by: str | None = None, drop: bool = False
) -> Splits:
    """A client's rows as records. Raises DataError where a group is in two splits."""
    try:
        whole = {split: without_missing(some, task, columns) if drop else some for split, some in rows.items()}
        if left_out := sum(map(len, rows.values())) - sum(map(len, whole.values())):
            count = sum(map(len, rows.values()))
            if left_out == count:
                raise DataError(f"all its {count} records lack a value, so missing: drop leaves none")
            _LOG.warning("client %s: %d of %d records lack a value and are left out", client, left_out, count)
        everything = [row for some in whole.values() for row in some]
        splits = {split: items_of(some, task, columns, by, everything) for split, some in whole.items()}
        for first, second in combinations(splits, 2):
            groups = {item.group for item in splits[first]} & {item.group for item in splits[second]} - {None}
            if groups:
                raise DataError(
                    f"{columns['group']} {min(map(str, groups))} has records in {first} and in {second} "
                    f"({len(groups)} such in all), and a group has to be in one (data.columns.group)"
                )
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    return splits


def _without_repeats(client: str, splits: Splits) -> Splits:
    """Each record once: in test, else in val, else in train."""
    seen: set[tuple[str | None, str]] = set()
    kept: Splits = {}

    def is_new(item: Item) -> bool:
        new = item.same_as not in seen
        seen.add(item.same_as)
        return new

    for split in reversed(SPLITS):
        if split in splits:
            kept[split] = list(filter(is_new, splits[split]))
    if left_out := sum(map(len, splits.values())) - sum(map(len, kept.values())):
        count = sum(map(len, splits.values()))
        _LOG.warning("client %s: %d of %d records repeat another of it and are left out", client, left_out, count)
    return {split: kept[split] for split in splits}


def _resolve(client: str, splits: Splits, names: Sequence[str], classes: Mapping[str | int, int], given: bool) -> None:
    def resolve(item: Item) -> None:
        item.record["label"] = label_of(item, names, classes, given)

    try:
        map_all(resolve, chain.from_iterable(splits.values()))
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error


def _carve(client: str, splits: Splits, settings: DataSettings, seed: int, one_by_one: bool, secret: str) -> list[str]:
    """Hold out the splits that the client has no file for, test first; returns their names."""
    carved = []
    for split, fraction in (("test", settings.test_fraction), ("val", settings.val_fraction)):
        if split in splits or fraction == 0 or not splits["train"]:
            continue
        items, draw = splits["train"], partial(_each_by_itself, secret=secret) if one_by_one else _exact_share
        out = draw(client, split, items, fraction, seed)
        splits[split] = [item for index, item in enumerate(items) if index in out]
        splits["train"] = [item for index, item in enumerate(items) if index not in out]
        carved.append(split)
    return carved


def _exact_share(client: str, split: str, items: Sequence[Item], fraction: float, seed: int) -> set[int]:
    """Indices of so many records as are nearest to the fraction, whole groups or every class by its share."""
    count = max(1, int(fraction * len(items) + 0.5))
    if count >= len(items):
        raise DataError(
            f"client {client}: too few training records, {len(items)}, to hold {count} out for "
            f"{split}. Give it more, or a {split} file, set data.{split}_fraction to 0, or leave the client out"
        )
    rng = generator(seed, "files", f"{client}/{split}")
    if items[0].group is None:
        return set(held_out([item.record.get("label", item.record.get("task")) for item in items], count, rng))
    out = set(held_out_groups([item.group for item in items], count, rng))
    if len(out) in (0, len(items)):
        raise DataError(
            f"client {client}: all its {len(items)} training records are of one group (data.columns.group), so "
            f"none can be held out for {split}. Give it more, or a {split} file, or leave the client out, or "
            "columns.group, if its records need not stay together"
        )
    return out


def _each_by_itself(
    client: str, split: str, items: Sequence[Item], fraction: float, seed: int, secret: str
) -> set[int]:
    """Indices of records, or of whole groups, each drawn from its own content, with the fraction as its probability: so
    one record more or less at the client leaves all others in the splits that they are in.

    secret  without one, who knows the seed can compute the draw of a guess, and sees in sizes whether it is there
    """
    hidden = (secret,) if secret else ()
    parts = (derive_seed(*hidden, seed, "files", client, split, item.group or item.digest) / 2**63 for item in items)
    out = {index for index, part in enumerate(parts) if part < fraction}
    if len(out) == len(items):
        raise DataError(
            f"client {client}: all of its {len(items)} records would be held out for {split}: with privacy.unit: "
            "example each is by itself, by chance. Give it more, or files for the splits"
        )
    if not out:
        _LOG.warning("client %s: none of its %d records is held out for %s, by chance", client, len(items), split)
    return out


def _client(client: str, splits: Splits) -> ClientData:
    train, val, test = (tuple(item.record for item in splits.get(split, ())) for split in SPLITS)
    return ClientData(client, train, val, test)


def _warn_of_repeats(read: Mapping[str, Splits]) -> None:
    """Warn of test records that their own client also trains on, since they make its score too good."""
    repeats = {}
    for client, splits in read.items():
        trained = {item.same_as for item in splits["train"]}
        repeats[client] = sum(item.same_as in trained for item in splits.get("test", ()))
    affected = {client: count for client, count in repeats.items() if count}
    if affected:
        worst = max(affected, key=lambda client: affected[client])
        _LOG.warning(
            "%d test records are also in their client's training data (most: %d of client %s); for a fair score "
            "remove them from the files, or set data.drop_duplicates: true",
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
