"""Rows of a user's file, each with the place it came from: JSON Lines, JSON, CSV, Parquet, a `datasets` directory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.core.errors import DataError, map_all

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One record as the file has it.

    values  column to value; in a table only the columns that were asked for
    fields  all columns that the record has in the file
    path    the file or directory
    place   where in it, counted from 1, such as "line 3"
    """

    values: dict[str, Any]
    fields: tuple[str, ...]
    path: Path
    place: str

    @property
    def where(self) -> str:
        return f"{self.path}, {self.place}"


def suffix_of(path: Path) -> str:
    """The ending that says how a file is read, or the empty string.

    >>> suffix_of(Path("lyon.v2.jsonl.gz")), suffix_of(Path("lyon.xlsx"))
    ('.jsonl.gz', '')
    """
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")


def is_dataset(path: Path) -> bool:
    """Whether the folder was written by `datasets.Dataset.save_to_disk`."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def is_readable(path: Path) -> bool:
    """Whether `read_rows` knows the kind of this file or directory."""
    return is_dataset(path) if path.is_dir() else bool(suffix_of(path))


def read_rows(path: Path, columns: Collection[str], names_of_labels: bool = True) -> list[Row]:
    """All records of a file or `datasets` directory; at least one. Raises DataError that names file and line."""
    if path.is_dir():
        if not is_dataset(path):
            raise DataError(f"{path} is a folder, but not one that datasets.Dataset.save_to_disk wrote")
        rows = table_rows(_load_dataset(path), path, columns, names_of_labels)
    elif not suffix_of(path):
        raise DataError(f"{path} is of no kind that is read here: {', '.join(SUFFIXES)} or a datasets directory")
    elif suffix_of(path) == ".parquet":
        rows = table_rows(_load_parquet(path), path, columns, names_of_labels)
    elif suffix_of(path) in (".csv", ".tsv"):
        rows = table_rows(_load_csv(path, "\t" if suffix_of(path) == ".tsv" else ","), path, columns)
    elif suffix_of(path).startswith(".jsonl"):
        rows = _json_lines(_content(path), path)
    else:
        rows = _json_list(_content(path), path)
    if not rows:
        raise DataError(f"{path} has no records")
    return rows


def read_table(path: Path) -> pyarrow.Table:
    """A Parquet file or `datasets` directory as it is, for data that is too large to become rows."""
    if path.is_dir() or suffix_of(path) == ".parquet":
        return _load_dataset(path) if path.is_dir() else _load_parquet(path)
    raise DataError(f"{path} must be a Parquet file or a datasets directory, which is read in parts")


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.lower().endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _json_lines(data: bytes, path: Path) -> list[Row]:
    """One object a line. Empty lines are allowed and counted."""
    # Cut before it is decoded: str.splitlines would also cut at U+2028, which JSON strings may hold.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return map_all(lambda pair: _object(_parse(pair[1], path, pair[0]), path, pair[0]), numbered)


def _json_list(data: bytes, path: Path) -> list[Row]:
    if not data.strip():
        return []
    try:
        values = _parse(data.removeprefix(b"\xef\xbb\xbf"), path, "")
    except DataError as error:
        raise DataError(f"{error}. A file with one object a line is JSON Lines, and ends in .jsonl") from error
    if not isinstance(values, list):
        raise DataError(f"{path} must hold a list of objects, not {_kind(values)}")
    return map_all(lambda numbered: _object(numbered[1], path, f"record {numbered[0]}"), enumerate(values, 1))


def _parse(data: bytes, path: Path, place: str) -> Any:
    where = f"{path}, {place}" if place else str(path)
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        spot = f"column {error.colno}" if place else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: is not JSON ({error.msg} at {spot})") from error
    except RecursionError as error:
        raise DataError(f"{where}: is nested too deeply") from error


def _object(value: Any, path: Path, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path}, {place}: must be an object with named fields, not {_kind(value)}")
    return Row(value, tuple(value), path, place)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _load_parquet(path: Path) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    try:
        # As a single file: otherwise folders named `key=value` above it would become columns.
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _load_csv(path: Path, delimiter: str) -> pyarrow.Table:
    """A table with a first line of names; every value is text, as it stands there. Quoted values may hold line ends."""
    import pyarrow
    from pyarrow import csv

    if not (data := _content(path).removeprefix(b"\xef\xbb\xbf")).strip():
        return pyarrow.table({})
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        names = csv.open_csv(pyarrow.BufferReader(data), parse_options=parse).schema.names
        convert = csv.ConvertOptions(column_types={name: pyarrow.string() for name in names}, strings_can_be_null=False)
        table = csv.read_csv(pyarrow.BufferReader(data), parse_options=parse, convert_options=convert)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error
    if len(names) == 1 and ";" in names[0]:
        raise DataError(
            f"{path}: its first line is {names[0]!r}; values are separated by {delimiter!r} here, so save "
            "it in that form"
        )
    return table


def _load_dataset(path: Path) -> pyarrow.Table:
    import datasets
    import pyarrow

    try:
        if not json.loads((path / "state.json").read_bytes())["_data_files"]:
            return pyarrow.table({})  # without records it is saved without files, and datasets cannot load that
        return datasets.Dataset.load_from_disk(str(path)).with_format("arrow")[:]
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a datasets directory: {error}") from error


def table_rows(table: pyarrow.Table, path: Path, columns: Collection[str], names_of_labels: bool = True) -> list[Row]:
    """The rows of a table. Class labels of `datasets` come as their names, which mean the same in every file.

    names_of_labels  false leaves them as numbers, for data whose names are known and are not always stored
    """
    fields = tuple(table.column_names)
    if len(set(fields)) < len(fields):
        raise DataError(f"{path} has two columns of one name: {', '.join(fields)}")
    selected = table.select([name for name in fields if name in columns])
    names = _class_names(selected.schema) if names_of_labels else {}
    rows = []
    for number, values in enumerate(selected.to_pylist(), 1):
        for column, known in names.items():
            value = values[column]
            if value is not None and 0 <= value < len(known):
                values[column] = known[value]
        rows.append(Row(values, fields, path, f"row {number}"))
    return rows


def _class_names(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """Names of the classes of every `ClassLabel` column, from what `datasets` writes beside the schema."""
    stored = (schema.metadata or {}).get(b"huggingface")
    if stored is None:
        return {}
    features = json.loads(stored).get("info", {}).get("features", {})
    return {
        column: feature["names"]
        for column, feature in features.items()
        if column in schema.names and isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
