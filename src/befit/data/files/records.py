"""From rows to the records of a task: fields by befit's names, checked, with labels as numbers of classes."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from befit.core.errors import ConfigError, DataError, did_you_mean, map_all
from befit.core.names import LONGEST_CLASS, is_class
from befit.core.schema import show
from befit.core.text import first_of
from befit.data.federation import GROUP
from befit.data.files.readers import Row, few
from befit.tasks import TaskKind, get_task

APART = ("id", "group")  # fields that records have beside those of their task, where `columns` names them


@dataclass(frozen=True, slots=True)
class Item:
    """A record whose label is not yet a number, where it comes from, the SHA-256 of its content without the id, and the
    group, such as a patient, that it belongs to."""

    record: dict[str, Any]
    where: str
    digest: str
    group: str | None = None

    @property
    def same_as(self) -> tuple[str | None, str]:
        """Equal for records that repeat each other. What two patients have in common repeats nothing."""
        return self.group, self.digest


def check_columns(task: str, columns: Mapping[str, str]) -> None:
    """Raise ConfigError for a task or a field that does not exist."""
    kind = get_task(task, "data.task")
    known = (*APART, *kind.fields, *kind.optional, *kind.other_fields, *kind.lists)
    problems = [
        f"data.columns.{field}: {task} has no such field; it has {', '.join(known)}.{did_you_mean(field, known)}"
        for field in columns
        if field not in known
    ]
    if problems:
        raise ConfigError(problems)


def column_names(task: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Field to the column that holds it. An id, a group and lists are read only where `columns` says from where."""
    kind = get_task(task)
    return {field: field for field in (*kind.fields, *kind.optional, *kind.other_fields)} | dict(columns)


def items_of(
    rows: Sequence[Row],
    task: str,
    columns: Mapping[str, str],
    by: str | None = None,
    among: Sequence[Row] | None = None,
) -> list[Item]:
    """Every row as a record of the task. Columns that the task does not know are left out, except the one called `by`,
    which does not count for the digest.

    Records without an id of their own are named by the first 16 digits of their digest, with -2, -3, … where the same
    content comes again. Raises DataError that names file, line, field and value.
    """
    kind, names = get_task(task), column_names(task, columns)
    optional = _in_use(kind.optional, columns, rows if among is None else among)
    repeats: dict[str, int] = {}
    places: dict[str, str] = {}

    def item(row: Row) -> Item:
        if kind.read_record is not None:
            for field in set(columns) - {*APART}:
                _raw(row, field, columns[field])  # a column that the user names has to be there
            record = kind.read_record(row.values, columns, lambda image: _image(image, row, "image"), row.where)
        elif kind.other_record is not None and (other := kind.other_record(row.values, columns, row.where)) is not None:
            record = other | {field: _texts(row, field, names[field]) for field in kind.lists if field in columns}
        else:
            record = {field: _value(row, field, names[field], kind) for field in kind.fields}
            record |= {field: _optional(row, field, names[field], field in columns) for field in optional}
            record |= {field: _texts(row, field, names[field]) for field in kind.lists if field in columns}
        digest = _digest(record, row)
        if "id" in columns:
            name = name_of(row, "id", names["id"])
            if name in places:
                raise DataError(f"{row.where}: id {name!r} was already given to {places[name]}")
            places[name] = row.where
        else:
            repeats[digest] = repeats.get(digest, 0) + 1
            name = digest[:16] + (f"-{repeats[digest]}" if repeats[digest] > 1 else "")
        kept = {by: row.values[by]} if by in row.values else {}
        group = name_of(row, "group", names["group"]) if "group" in columns else None
        kept |= {} if group is None else {GROUP: group}
        return Item({"id": name, **kept, **record}, row.where, digest, group)

    return map_all(item, rows)


def input_record(value: Any, task: str, columns: Mapping[str, str], where: str) -> Any:
    """An input to predict from: a record gets befit's names of its fields; anything else stays as it is.

    A field is looked for under its name in `columns`, then under befit's own. Raises DataError that begins with `where`
    for a record without the field that the task reads, and for what is neither a record nor, for texts, a text.
    """
    kind = get_task(task)
    if kind.read_input is not None:
        return kind.read_input(value, columns, where)
    if kind.other_input is not None and (other := kind.other_input(value, columns, where)) is not None:
        return other
    first, *others = (field for field in (*kind.fields, *kind.optional) if field != kind.answer)
    if not isinstance(value, Mapping):
        if first != "image" and not isinstance(value, str):
            raise DataError(f"{where}: must be a text or an object with {columns.get(first, first)}, got {show(value)}")
        if first != "image" and is_missing(value):
            raise DataError(f"{where}: is empty, so there is nothing to answer")
        return value
    names = {field: columns[field] if columns.get(field) in value else field for field in (first, *others)}
    if names[first] in value:
        if is_missing(value[names[first]]):
            raise DataError(f"{where}: {names[first]} is empty, so there is nothing to answer")
        return {field: value[name] for field, name in names.items() if name in value}
    if first == "image" and ("bytes" in value or "path" in value):
        return value  # itself an encoded picture
    column = columns.get(first, first)
    reason = f" (data.columns.{first})" if column != first else ""
    raise DataError(
        f"{where}: there is no {column}{reason}; the record has {few(tuple(map(str, value))) or 'nothing'}."
        f"{did_you_mean(column, map(str, value))}".removesuffix(".")
    )


def _value(row: Row, field: str, column: str, kind: TaskKind) -> Any:
    value = _raw(row, field, column)
    if field == "label":
        return _label(value, row, column)
    if field == "image":
        return _image(value, row, column)
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {column} must be text, got {show(value)}")
    if not value.strip():
        raise DataError(f"{row.where}: {column} is empty")
    return value


def _raw(row: Row, field: str, column: str) -> Any:
    if column not in row.fields:
        if same := [name for name in row.fields if as_read(name) == as_read(column)]:
            how = _unlike(column, same[0])
            raise DataError(
                f"{row.where}: there is no {column}; the file has {same[0]}, the same but for {how}. Write it so in "
                f"data.columns.{field}"
            )
        hint = did_you_mean(column, row.fields) if column != field else f" Say which with data.columns.{field}"
        if field == "instruction":
            hint += ", or give messages, prompt and completion, or text" * (column == field)
        if any(not name or name.isdecimal() for name in row.fields):
            hint += ". Is there no line with the columns' names? The first one has to be it"
        raise DataError(f"{row.where}: there is no {column}; the columns are {few(row.fields) or 'none'}.{hint}")
    return row.values[column]


def _optional(row: Row, field: str, column: str, mapped: bool) -> str:
    value = _raw(row, field, column) if mapped else row.values.get(column)
    if value is None and field == "input":
        return ""
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {column} must be text, as in the other records, got {show(value)}")
    return value


def _texts(row: Row, field: str, column: str) -> list[str]:
    value = _raw(row, field, column)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise DataError(f"{row.where}: {column} must be a list of texts, got {show(value)}")
    return value


def name_of(row: Row, field: str, column: str) -> str:
    """A text or whole number as the name of something: of the record itself, or of what it belongs to. Blanks around
    it do not count, nor does the fraction that a table with gaps gives whole numbers."""
    value = _raw(row, field, column)
    name = None if isinstance(value, bool) else label_value(value)
    if name is None or is_missing(name):
        raise DataError(f"{row.where}: {column} must be text or a whole number to serve as {field}, got {show(value)}")
    return str(name).strip()


def _in_use(optional: Sequence[str], columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    """Of the fields that records may lack, those that are named, or that any of these rows has."""
    return [field for field in optional if field in columns or any(row.values.get(field) is not None for row in rows)]


def without_missing(rows: Sequence[Row], task: str, columns: Mapping[str, str]) -> list[Row]:
    """The rows that have a value in every field that the task needs, in a second text where there is one, and in id and
    group where `columns` names them: no null, no NaN, no blank text and no message without text. A column that no row
    has is left for `items_of` to refuse.

    Of a task that reads records in several forms a row needs the fields of the plain one, or all that it has of any.
    """
    names, kind = column_names(task, columns), get_task(task)
    present = {name for row in rows for name in row.fields}
    plain, others = ([names.get(field, field) for field in fields] for fields in (kind.fields, kind.other_fields))
    apart = [columns[field] for field in APART if columns.get(field) in present]
    if kind.read_record is None:  # an input may be empty, and what else is there has to be there in all records
        apart += [names[field] for field in _in_use(kind.optional, columns, rows) if field != "input"]

    def lacks(row: Row) -> bool:
        if any(is_missing(row.values.get(name)) for name in apart):
            return True
        gaps = [name for name in plain if name in present and is_missing(row.values.get(name))]
        if not others or not (gaps or any(name not in present for name in plain)):
            return bool(gaps)
        return any(is_missing(row.values.get(name)) for name in (*plain, *others) if name in row.fields)

    return [row for row in rows if not lacks(row)]


def is_missing(value: Any) -> bool:
    if isinstance(value, list):  # a conversation without messages, or with one without text
        texts = (turn.get("content", turn.get("value")) for turn in value if isinstance(turn, Mapping))
        return not value or any(map(is_missing, texts))
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and value != value)


def label_value(value: Any) -> str | int | None:
    """A class's name or number; None for what is neither. Of tables: yes or no by its name, and a whole number that is
    stored with a fraction, as where a column has gaps.

    >>> label_value(True), label_value(2.0), label_value("2.0"), label_value(0.5), label_value("")
    ('True', 2, '2.0', None, None)
    """
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int)) and value != "" else None


def _label(value: Any, row: Row, column: str) -> str | int:
    if (label := label_value(value)) is None or is_missing(label):
        raise DataError(f"{row.where}: {column} must be a class's name or whole number, got {show(value)}")
    return label


def _image(value: Any, row: Row, column: str) -> str | bytes:
    """The absolute path of a picture or `.npy` file that exists, or the encoded picture."""
    if isinstance(value, Mapping):
        if isinstance(data := value.get("bytes"), bytes) and data:
            return data
        value = value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{row.where}: {column} must be a relative path or {{bytes, path}}, got {show(value)}")
    if Path(value).is_absolute() or ".." in PurePosixPath(value.replace("\\", "/")).parts:
        raise DataError(f"{row.where}: {column} {show(value)} must be a path below {row.path.parent}, without '..'")
    # Not resolved itself: a link to a picture elsewhere is the user's own doing, and keeps its name here.
    path = row.path.parent.resolve() / value
    if not os.path.isfile(path):  # unlike Path.is_file, False for what is too long to be a name, such as base64
        raise DataError(f"{row.where}: {column} {show(value)} is no file in {row.path.parent}")
    return str(path)


def _digest(record: Mapping[str, Any], row: Row) -> str:
    """SHA-256 of the canonical JSON. A picture counts by its bytes, wherever they are and whatever their name; a field
    that is empty because others have it does not count."""
    content = {field: value for field, value in record.items() if value != ""}
    if (image := content.get("image")) is not None:
        content["image"] = _image_digest(image, row.where)
    if "images" in content:
        content["images"] = [_image_digest(image, row.where) for image in content["images"]]
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        broken = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{row.where}: holds {broken}, half of a surrogate pair, which is no character") from error
    return hashlib.sha256(text).hexdigest()


def _image_digest(image: str | bytes, where: str) -> str:
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    try:
        file = os.stat(image)
        return _file_digest(image, file.st_size, file.st_mtime_ns)
    except OSError as error:
        raise DataError(f"{where}: {image} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=2**16)  # many questions may be about one picture
def _file_digest(path: str, size: int, changed: int) -> str:
    """SHA-256 of a file that had this size and was changed last at this time, in nanoseconds."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def classes_of(
    label_names: Sequence[str] | None, training: Iterable[Item]
) -> tuple[tuple[str, ...], dict[str | int, int]]:
    """Names of the classes, and what a label may be to the number of its class.

    Without `label_names` the classes are the sorted labels of all training records. With them a label is a name, or
    the number of one from 0; but where any name is itself a whole number ("1" to "5" stars), numbers are names too.
    """
    if label_names is not None:
        classes: dict[str | int, int] = {name: index for index, name in enumerate(label_names)}
        if len(classes) < len(label_names):
            raise ConfigError(["data.label_names: names a class twice"])
        numbered = {int(name): index for index, name in enumerate(label_names) if _is_number(name)}
        # A number in a table is an int, and in a CSV file a text.
        classes |= numbered or {key: index for index in range(len(label_names)) for key in (index, str(index))}
    else:
        first: dict[str | int, str] = {}
        for item in training:
            first.setdefault(item.record["label"], item.where)
        kinds = {type(label): (label, where) for label, where in reversed(first.items())}
        if len(kinds) > 1:
            shown = " but ".join(f"{show(label)} in {where}" for label, where in kinds.values())
            raise DataError(f"labels are numbers and names: {shown}. Use one of them everywhere, or give label_names")
        for label, where in first.items():
            if not is_class(str(label)):
                raise DataError(
                    f"{where}: label {show(label)} is no name of a class: printable letters, {LONGEST_CLASS} at most"
                )
        label_names = [str(label) for label in sorted(first)]  # type: ignore[type-var]
        classes = {label: index for index, label in enumerate(sorted(first))}  # type: ignore[type-var]
    if len(label_names) < 2:
        raise DataError(f"classification needs two classes, and there is {', '.join(label_names) or 'none'}")
    return tuple(label_names), classes


def _is_number(name: str) -> bool:
    return name.isascii() and name.removeprefix("-").isdigit() and str(int(name)) == name


def plainly(name: str) -> str:
    """A class's name without case and blanks, which make no other class for a reader.

    >>> plainly(" Viral  Flu")
    'viral flu'
    """
    return " ".join(name.casefold().split())


def _unlike(name: str, other: str) -> str:
    """In what a name differs from another that is read as the same."""
    if plainly(name) == plainly(other):
        return "case or blanks"
    return f"how its letters are encoded in Unicode: {name!a} here, there {other!a}"  # no screen shows it


def as_read(name: str) -> str:
    """The same without how its letters are encoded: some exports write an accent apart from its letter, as macOS does.

    >>> as_read("Gru\\u0308n") == as_read("gr\\u00fcn"), plainly("Gru\\u0308n") == plainly("gr\\u00fcn")
    (True, False)
    """
    return plainly(unicodedata.normalize("NFKC", name))


def label_of(item: Item, names: Sequence[str], classes: Mapping[str | int, int], given: bool) -> int:
    """The number of the item's class. `given`: the names are the configuration's, not collected from training."""
    label = item.record["label"]
    if label in classes:
        return classes[label]
    if isinstance(label, str) and (same := [name for name in names if as_read(name) == as_read(label)]):
        how = _unlike(label, same[0])
        raise DataError(f"{item.where}: label {show(label)} is {same[0]} but for {how}: write it so in the file")
    listed = first_of(names)
    reason = f"is not one of {listed}" if given else f"is no client's in training, which has {listed}"
    hint = did_you_mean(label, names) if isinstance(label, str) else ""
    mend = f" If it is a class, list {'it' if given else 'all'} in data.label_names"
    raise DataError(f"{item.where}: label {show(label)} {reason}.{hint}{mend}")
