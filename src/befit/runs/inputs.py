"""What to predict from: texts, pictures and records as they are given, and files of them, read as training data is."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from befit.core.errors import DataError
from befit.core.text import looked_from
from befit.data.files.readers import NOTES, PICTURES, SUFFIXES, Row, is_class_folder, is_picture, is_readable, read_rows
from befit.tasks import TaskKind, get_task

Placed = tuple[Any, str]  # an input, and where it is from, for messages


def read_inputs(inputs: Iterable[Any], task: str, columns: Mapping[str, str]) -> list[Placed]:
    """Every input with the place it is from. A `Path` stands for all that is in the file or folder.

    columns  befit's names of fields to those of the files

    Raises DataError for a file that the task cannot read, and for a text that is the name of a file.
    """
    if isinstance(inputs, str):
        raise DataError(f"inputs must be a list of inputs, got the text {inputs[:40]!r}: put it into a list")
    kind, placed = get_task(task), list[Placed]()
    for number, value in enumerate(inputs, 1):
        if isinstance(value, Path):
            placed += _in_file(value, kind, columns)
        elif isinstance(value, str) and not _sees(kind) and os.path.exists(value):
            raise DataError(
                f"input {number}: {value!r} is a file, and no text: give it as pathlib.Path to have it read"
            )
        elif isinstance(value, str) and _sees(kind) and not os.path.exists(value):
            raise DataError(_nowhere(Path(value)))
        else:
            placed.append((value, f"input {number}"))
    if not placed:
        raise DataError("there are no inputs to predict from")
    return placed


def named_file(text: str) -> bool:
    """Whether a word of the command line stands for a file: it is one, or ends as those that hold several inputs do.

    >>> named_file("south.csv"), named_file("a cough, and fever.")
    (True, False)
    """
    return os.path.exists(text) or text.lower().endswith((*SUFFIXES, ".txt"))


def _nowhere(path: Path) -> str:
    return f"there is no file {path}{looked_from(path)}"


def _sees(kind: TaskKind) -> bool:
    """Whether a picture alone is an input."""
    return kind.processor == "images"


def _in_file(path: Path, kind: TaskKind, columns: Mapping[str, str]) -> list[Placed]:
    if not path.exists():
        raise DataError(_nowhere(path))
    if is_readable(path) and not (_sees(kind) and is_class_folder(path)):
        pictures = {columns.get(field, field) for field in ("image", "images")} if kind.processor != "tokenizer" else ()
        asked = [columns.get(field, field) for field in (*kind.fields, *kind.optional, *kind.other_fields)]
        optional = {columns.get(field, field) for field in kind.optional}
        return [(_record(row, asked, pictures, optional), row.where) for row in read_rows(path, None)]
    if path.suffix.lower() == ".txt":
        return _lines(path)
    if _sees(kind):
        return [(str(picture), str(picture)) for picture in (_pictures(path) if path.is_dir() else [path])]
    raise DataError(
        f"{path} is not a file type that {kind.name} reads: .txt, {', '.join(SUFFIXES)} or a datasets directory"
    )


def _record(row: Row, asked: Iterable[str], pictures: Iterable[str], optional: Collection[str]) -> dict[str, Any]:
    """A row as a record, the fields that are asked about first; paths of pictures count from the file's folder."""
    fields = dict.fromkeys([*(field for field in asked if field in row.fields), *row.fields])
    values = {field: row.values.get(field) for field in fields}
    values = {field: value for field, value in values.items() if value is not None or field not in optional}
    return values | {name: _beside(values[name], row.path.parent) for name in pictures if name in values}


def _beside(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_beside(item, folder) for item in value]
    if isinstance(value, Mapping) and not value.get("bytes") and isinstance(value.get("path"), str):
        return {**value, "path": str(folder / value["path"])}
    return str(folder / value) if isinstance(value, str) else value


def _lines(path: Path) -> list[Placed]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; it must be UTF-8, with one input a line") from error
    return placed_lines(lines, str(path))


def placed_lines(lines: Iterable[str], source: str) -> list[Placed]:
    """One input a line; empty lines are left out. Raises DataError where there is none."""
    placed = [(line, f"{source}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not placed:
        raise DataError(f"{source} holds no inputs: give one a line")
    return placed


def _pictures(folder: Path) -> list[Path]:
    """All pictures of a folder and those below it, in the order of their paths."""
    every = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    files = [path for path in every if path.suffix.lower() not in NOTES]
    for path in files:
        if not is_picture(path):
            raise DataError(f"{path} is no picture ({', '.join(PICTURES)}); name a folder that has pictures alone")
    if not files:
        raise DataError(f"{folder} holds no pictures")
    return files
