"""Rows of a user's file, each with the place it came from: JSON Lines, JSON, CSV, Parquet, a `datasets` directory, or
folders of pictures."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.core.errors import DataError, brief, map_all
from befit.core.jsonfile import parse_json
from befit.core.text import first_of, looked_from

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (*(kind + packed for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")), ".parquet")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".npy")
NOTES = (".md", ".txt", ".db", ".ini")  # and what file managers leave, beside pictures
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
# What unpacks to more than both is no data but a bomb: text packs to a tenth, zeros to a thousandth of its size.
_RATIO, _GZIP, _PARQUET = 100, 2**20, 2**26
_ROWS = 1_000_000  # of a Parquet file that has more rows than bytes


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


def is_class_folder(path: Path) -> bool:
    """Whether the folder has folders of pictures, each named by its class: neither those of splits, nor folders beside
    a file with records. Empty ones do not count."""
    folders = [folder for folder in _folders(path) if any(folder.iterdir())] if path.is_dir() else []
    return (
        bool(folders)
        and not any(suffix_of(entry) for entry in path.iterdir())
        and all(
            folder.name not in SPLITS and any(is_picture(entry) for entry in folder.iterdir()) for folder in folders
        )
    )


def is_picture(path: Path) -> bool:
    """Whether a file is a picture by its name."""
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def is_readable(path: Path) -> bool:
    """Whether `read_rows` knows the kind of this file or directory."""
    return is_dataset(path) or is_class_folder(path) if path.is_dir() else bool(suffix_of(path))


def read_rows(path: Path, columns: Collection[str] | None, names_of_labels: bool = True) -> list[Row]:
    """All records of a file, `datasets` directory or folder of classes; at least one. Raises DataError that names file
    and line.

    columns  those of a table that are read; None: all
    """
    if not path.exists():
        raise DataError(f"there is no file {path}{looked_from(path)}")
    if path.is_dir() and is_class_folder(path):
        rows = _pictures(path)
    elif path.is_dir():
        if not is_dataset(path):
            raise DataError(
                f"{path} is a folder, but neither one that datasets.Dataset.save_to_disk wrote nor one of folders of "
                "pictures, each named by its class"
            )
        rows = table_rows(_load_dataset(path), path, columns, names_of_labels)
    elif not suffix_of(path):
        raise DataError(f"{path} is not a file type that befit reads: {', '.join(SUFFIXES)} or a datasets directory")
    elif suffix_of(path) == ".parquet":
        rows = table_rows(_load_parquet(path), path, columns, names_of_labels)
    elif suffix_of(path).startswith((".csv", ".tsv")):
        rows = _csv_rows(_content(path), path, "\t" if suffix_of(path).startswith(".tsv") else ",", columns)
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


def _pictures(path: Path) -> list[Row]:
    """A record for each picture in the folders of classes, in the order of their names."""
    rows: list[Row] = []
    for folder in _folders(path):
        for entry in sorted(folder.iterdir()):
            if is_picture(entry):
                # The place is the folder of the class, so that the image's path counts from the one above.
                values = {"image": f"{folder.name}/{entry.name}", "label": folder.name}
                rows.append(Row(values, tuple(values), folder, entry.name))
            elif entry.is_dir() and not entry.name.startswith("."):
                raise DataError(
                    f"{entry} is a folder; pictures have to lie in the folder of their class itself. Move them up, or "
                    "name them in a table with a column of paths"
                )
            elif not entry.name.startswith(".") and entry.suffix.lower() not in NOTES:
                raise DataError(f"{entry} is no picture that is read here: {', '.join(PICTURES)}")
    return rows


def _content(path: Path) -> bytes:
    try:
        if not path.name.lower().endswith(".gz"):
            return path.read_bytes()
        most = max(_GZIP, _RATIO * path.stat().st_size)
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {brief(error)}") from error
    if len(data) > most:
        raise _bomb(path, "run gunzip and name the unpacked file")
    return data


def _bomb(path: Path, mend: str) -> DataError:
    return DataError(f"{path} unpacks to more than {_RATIO} times its size, as records do not; if it should, {mend}")


def _json_lines(data: bytes, path: Path) -> list[Row]:
    """One object a line. Empty lines are allowed and counted."""
    # Cut before it is decoded: str.splitlines would also cut at U+2028, which JSON strings may hold.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    return map_all(lambda pair: _object(_parse(pair[1], path, pair[0]), path, pair[0]), numbered)


def _json_list(data: bytes, path: Path) -> list[Row]:
    if not data.strip():
        return []
    try:
        values = _parse(data, path, "")
    except DataError as error:
        if "is not JSON" not in str(error):
            raise
        raise DataError(f"{error}. A file with one object a line is JSON Lines, and ends in .jsonl") from error
    if not isinstance(values, list):
        raise DataError(f"{path} must hold a list of objects, not {_kind(values)}")
    return map_all(lambda numbered: _object(numbered[1], path, f"record {numbered[0]}"), enumerate(values, 1))


def _parse(data: bytes, path: Path, place: str) -> Any:
    return parse_json(data, f"{path}, {place}" if place else str(path), DataError, halves=True, once=True)


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

    batches: list[pyarrow.RecordBatch] = []
    try:
        size = path.stat().st_size
        # As a single file: otherwise folders named `key=value` above it would become columns.
        with pyarrow.parquet.ParquetFile(path) as file:
            unpacked, most = 0, max(_PARQUET, _RATIO * size)
            is_bomb = file.metadata.num_rows > max(_ROWS, size)
            # In small parts, since a few bytes may stand for as many copies of a long text as there are rows.
            for batch in () if is_bomb else file.iter_batches(batch_size=1024):
                batches.append(batch)
                unpacked += sum(map(_size, batch.columns))
                if is_bomb := unpacked > most:
                    break
            if not is_bomb:
                return pyarrow.Table.from_batches(batches, file.schema_arrow)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {brief(error)}") from error
    raise _bomb(path, "save it as .jsonl")


def _size(column: pyarrow.Array) -> int:
    """Bytes of a column as values: of a dictionary's, as often as they are repeated."""
    import pyarrow

    return (column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column).nbytes


_SEPARATORS = {"\t": "tabs", "|": "'|'"}  # other than those that are read, by what a message calls them


def _csv_rows(data: bytes, path: Path, delimiter: str, columns: Collection[str] | None) -> list[Row]:
    """Rows below a first line of names; every value is text, as it stands there. Quoted values may hold line ends.

    Where the first line has semicolons and no comma, as spreadsheets in many countries write CSV, semicolons stand
    between all values; so does what a line `sep=;` before it says. Empty lines are allowed. A quote that is not closed
    where CSV closes it is an error: it would make one value of all records up to the next.
    """
    _check_utf8(data := data.removeprefix(b"\xef\xbb\xbf"), path)
    begins = 1
    if told := re.match(rb'"?sep=([,;\t])"?\r?\n', data):  # which Excel writes and reads for itself
        data, delimiter, begins = data[told.end() :], told[1].decode(), 2
    first = re.sub(rb'"[^"]*"', b"", data.lstrip().partition(b"\n")[0])  # what is in quotes separates nothing
    if delimiter == "," and not told and b";" in first and b"," not in first:
        delimiter = ";"
    lines = csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter, strict=True)
    usual, skipped = csv.field_size_limit(sys.maxsize), begins - 1
    names: tuple[str, ...] = ()
    rows: list[Row] = []
    try:
        for values in lines:
            if not names:
                names = tuple(values)
                _check_names(names, path)
                if len(names) == 1 and (between := next((mark for mark in _SEPARATORS if mark in names[0]), "")):
                    raise DataError(
                        f"{path}, line {begins}: its names are separated by {_SEPARATORS[between]}; commas or "
                        "semicolons have to stand between values, or tabs in a file that ends in .tsv"
                    )
            elif values:
                if len(values) != len(names):
                    quotes = f"; a value with {delimiter!r} in it has to be in quotes" * (len(values) > len(names))
                    raise DataError(
                        f"{path}, line {begins}: the first line names {len(names)} columns, and this one has "
                        f"{len(values)}{quotes}"
                    )
                if delimiter == "\t" and any("\t" in value and "\n" in value for value in values):
                    raise DataError(
                        f"{path}, line {begins}: a value in quotes holds tabs and line ends, so the quotes seem to "
                        "belong to texts of several records; write the file as Parquet or JSONL"
                    )
                pairs = zip(names, values, strict=True)
                kept = {name: value for name, value in pairs if columns is None or name in columns}
                rows.append(Row(kept, names, path, f"line {begins}"))
            begins = skipped + lines.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begins}: cannot be read as CSV: a quote that opens a value has to close it, and one within "
            f'a value in quotes is written twice ("")'
        ) from error
    finally:
        csv.field_size_limit(usual)
    return rows


def _check_names(names: Sequence[str], path: Path) -> None:
    if len(set(names)) < len(names):
        raise DataError(f"{path} has two columns of one name: {few(names)}")


def _check_utf8(data: bytes, path: Path) -> None:
    """Raise DataError where a table is not UTF-8, with the line."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16; save it as UTF-8")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save it as UTF-8"
        ) from error


def _load_dataset(path: Path) -> pyarrow.Table:
    import datasets
    import pyarrow

    try:
        if not parse_json((path / "state.json").read_bytes(), str(path / "state.json"), DataError)["_data_files"]:
            return pyarrow.table({})  # without records it is saved without files, and datasets cannot load that
        return datasets.Dataset.load_from_disk(str(path)).with_format("arrow")[:]
    except DataError:
        raise
    except Exception as error:  # whatever a damaged folder makes datasets raise
        raise DataError(f"{path} cannot be read as a datasets directory: {brief(error)}") from error


def table_rows(
    table: pyarrow.Table, path: Path, columns: Collection[str] | None, names_of_labels: bool = True
) -> list[Row]:
    """The rows of a table. Class labels of `datasets` come as their names, which mean the same in every file; -1, which
    it writes where there is none, is a gap.

    names_of_labels  false leaves them as numbers, for data whose names are known and are not always stored
    """
    try:
        fields = tuple(table.column_names)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has a column whose name is not UTF-8 text: {brief(error)}") from error
    _check_names(fields, path)
    selected = table if columns is None else table.select([name for name in fields if name in columns])
    names = _class_names(selected.schema, path) if names_of_labels else {}
    rows = [Row({}, fields, path, f"row {number}") for number in range(1, len(table) + 1)]
    for column in selected.column_names:
        classes = names.get(column, ())
        for row, value in zip(rows, _column(selected[column], path, column), strict=True):
            if classes and isinstance(value, int) and -1 <= value < len(classes):
                row.values[column] = classes[value] if value >= 0 else None
            else:
                row.values[column] = value
    return rows


def few(names: Sequence[str]) -> str:
    """Names for a sentence: the first twenty, each shortened."""
    return first_of(map(brief, names))


def _column(values: pyarrow.ChunkedArray, path: Path, name: str) -> list[Any]:
    try:
        values.validate(full=True)  # neither Parquet nor Arrow checks what it reads: offsets, UTF-8
        return values.to_pylist()
    except Exception as error:  # whatever a broken page, or a date out of range, makes pyarrow raise
        raise DataError(f"{path}: its column {brief(name)} cannot be read: {brief(error)}; write it again") from error


def _class_names(schema: pyarrow.Schema, path: Path) -> dict[str, list[str]]:
    """Names of the classes of every `ClassLabel` column, from what `datasets` writes beside the schema."""
    stored = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), f"{path}: its notes of datasets", DataError)
    try:
        features = stored.get("info", {}).get("features", {}).items()
        labels = {column: feature for column, feature in features if feature.get("_type") == "ClassLabel"}
        names = {column: list(feature["names"]) for column, feature in labels.items() if column in schema.names}
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: its notes of datasets are damaged: {brief(error)}; write it again") from error
    return names
