"""Which files hold which split of which client: from a user's setting to paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from befit.core.errors import DataError, did_you_mean, listed
from befit.core.names import id_problems
from befit.core.text import first_of, looked_from
from befit.data.files.readers import SPLITS, SUFFIXES, is_class_folder, is_dataset, is_readable, suffix_of

Sources = dict[str, list[Path]]
Clients = str | Path | Mapping[str, str | Path | Mapping[str, Any]]

ALL = "all"  # one file with everything, of which validation and test are held out
_SHARD = re.compile(r"(?P<split>.+)-\d+-of-0*(?P<count>\d+)")


def files_of(entry: Any) -> Any:
    """A client's entry without its columns: a path, or a mapping from split to path."""
    if not isinstance(entry, Mapping):
        return entry
    return {key: value for key, value in entry.items() if key != "columns" and value is not None}


def columns_by_client(clients: Clients | None, columns: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """For every client that is listed, field to column: its own over those of all."""
    entries = clients.items() if isinstance(clients, Mapping) else ()
    return {
        client: {**columns, **((isinstance(entry, Mapping) and entry.get("columns")) or {})}
        for client, entry in entries
    }


def client_sources(clients: Clients, trains: bool = True) -> dict[str, Sources]:
    """For every client, in order, the files of `train`, `val` and `test`, or of `ALL`.

    clients  a folder that has a file or a folder for each client, in the order of their names; or a mapping from
             client to a file, a folder or {train, val, test}, where `columns` may stand too
    trains   whether each needs training data, as clients do and newcomers do not

    An id is any printable name, see `befit.core.names`. A client's folder has train, perhaps val (or validation) and
    test: files, shards such as `train-00000-of-00002.parquet`, directories that `datasets` saved, or folders of
    classes; or it is such a directory or folder itself. Raises DataError that names the client.
    """
    entries = clients if isinstance(clients, Mapping) else client_entries(Path(clients))
    if not entries:
        raise DataError("there are no clients")
    if problems := id_problems(entries):
        raise DataError(listed(problems))
    sources_of: dict[str, Sources] = {}
    for client, value in entries.items():
        try:
            sources_of[client] = (
                _from_mapping(files_of(value), trains) if isinstance(value, Mapping) else _from_path(value, trains)
            )
        except (DataError, OSError) as error:
            raise DataError(f"client {client}: {error}") from error
    missing = [
        (client, path)
        for client, sources in sources_of.items()
        for paths in sources.values()
        for path in paths
        if not path.exists()
    ]
    if missing:
        raise DataError(first_of((f"client {client}: there is no file {path}" for client, path in missing), 5, "; "))
    return sources_of


def client_entries(folder: Path) -> dict[str, Path]:
    """Client id to file or folder. Hidden files and Markdown are skipped; other unreadable files are errors."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}{looked_from(folder)}")
    entries: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith(".") or path.suffix == ".md":
            continue
        if not path.is_dir() and not suffix_of(path):
            raise DataError(f"{path} is no client: a client is a folder or a file ending in {', '.join(SUFFIXES)}")
        client = path.name if path.is_dir() else path.name[: -len(suffix_of(path))]
        if client in SPLITS:
            raise DataError(
                f"{path} is a split, and {folder} therefore the folder of a single client: name the folder "
                "above it, or write clients: {id: folder, …}"
            )
        if client in entries:
            raise DataError(f"there are two clients {client}: {entries[client].name} and {path.name} in {folder}")
        entries[client] = path
    if not entries:
        raise DataError(f"{folder} has no clients: expected a folder or a file for each")
    return entries


def _from_mapping(splits: Mapping[str, str | Path], trains: bool) -> Sources:
    sources: Sources = {}
    for name, path in splits.items():
        if name not in SPLITS.values():
            raise DataError(f"{name!r} is not a split; use train, val or test.{did_you_mean(name, SPLITS.values())}")
        sources[name] = [Path(path)]
    return _checked(sources, "the mapping", trains)


def _from_path(value: str | Path, trains: bool) -> Sources:
    path = Path(value)
    if not path.is_dir() or is_dataset(path) or is_class_folder(path):
        return {ALL: [path]}
    sources: Sources = {}
    shards: dict[str, int] = {}
    unread: dict[str, Path] = {}  # folders that are named like splits
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name):
        if entry.is_file() and entry.name.split(".")[0] in SPLITS and not is_readable(entry):
            raise DataError(f"{entry} is not a file type that befit reads: {', '.join(SUFFIXES)}")
        if entry.name.startswith(".") or entry.name == "dataset_dict.json" or not is_readable(entry):
            if entry.is_dir() and entry.name in SPLITS:
                unread[SPLITS[entry.name]] = entry
            continue  # images, notes
        stem = entry.name if entry.is_dir() else entry.name[: -len(suffix_of(entry))]
        shard = _SHARD.fullmatch(stem)
        split = SPLITS.get(shard["split"] if shard else stem)
        if split is None:
            raise DataError(
                f"{entry} is not a split of {path}; files are named train, val, valid or validation, and test. "
                "Otherwise write {train: …, val: …, test: …}"
            )
        if shard:
            shards[split] = int(shard["count"])
        sources.setdefault(split, []).append(entry)
    for split, entry in unread.items():
        if split not in sources:  # beside a file of the split it holds that file's pictures
            raise DataError(
                f"{entry} is named like a split and cannot be read as one: it is no folder that has one folder of "
                f"pictures for each class and nothing else, and no `datasets` directory. Put the records into a file "
                f"{path / split}.jsonl, write {{train: …, {split}: …}}, or give it another name"
            )
    for split, paths in sources.items():
        if len(paths) != shards.get(split, 1):
            names = ", ".join(part.name for part in paths)
            raise DataError(f"{path} must have {shards.get(split, 1)} of {split}, and has {len(paths)} of it: {names}")
    return _checked(sources, str(path), trains)


def _checked(sources: Sources, where: str, trains: bool) -> Sources:
    """The sources, if there is something to train on where that is needed and no file is in two splits."""
    if not sources or (trains and "train" not in sources):
        kinds = f"train{{{','.join(SUFFIXES)}}}, a datasets directory, or folders of pictures named by their class"
        raise DataError(f"{where} has no train ({kinds}); found {', '.join(sources) or 'nothing'}")
    seen: dict[Path, str] = {}
    for split, paths in sources.items():
        for path in paths:
            if other := seen.get(path.resolve()):
                raise DataError(f"{path} is both {other} and {split}: its score would be that of the training data")
            seen[path.resolve()] = split
    return sources
