"""What a folder of data seems to hold: whose it is, what can be learned from it and under which names. A first guess,
for `befit init`; `befit check` is what decides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from befit.core.errors import DataError
from befit.core.names import id_problems
from befit.core.text import looked_from
from befit.data.files.client_files import ALL, client_sources
from befit.data.files.readers import (
    SPLITS,
    SUFFIXES,
    Row,
    few,
    is_picture,
    is_readable,
    read_rows,
    suffix_of,
)
from befit.data.files.records import is_missing, label_value

EXPECTED = (
    f"a file ({', '.join(SUFFIXES)}) or folder for each client, one file with a column that says whose a record is, or "
    "a folder for each client with pictures in folders named by their class"
)
# Words of column names, by what such a column is; the first that a table has is taken.
WORDS = {
    "client": "client site hospital clinic centre center institution institute organisation organization company bank "
    "branch school shop store office department ward team device user customer author location city region country "
    "standort klinik krankenhaus praxis filiale abteilung hopital clinique agence etablissement",
    "group": "patient subject participant person case mrn",
    "label": "label labels class category diagnosis diagnose dx target outcome sentiment intent stars rating topic "
    "finding y",
    "text": "text note notes report sentence content body review comment description abstract letter message utterance "
    "document befund",
    "image": "image images picture photo scan file path img bild",
    "instruction": "instruction question query frage prompt",
    "output": "output response answer reply antwort completion",
    "input": "input context",
}
# Two texts that one label is about, as data sets for it call them.
_PAIRS = (
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)
_CLASSES = 50  # more different values than this are no classes
_CHAT = ("messages", "conversations", "conversation")  # columns with conversations, by the names that are usual
_BESIDE = ("choices", "form", "metric", "task")  # what questions about pictures may have too


@dataclass(frozen=True)
class SurveyedFolder:
    """What a folder seems to hold.

    places      client to its file or folder; of data in one place, None to that
    task        what can be learned
    columns     for each of `places`, befit's name of a field to the column's
    others      columns that no field is taken from
    by          the column of the records' client, of data in one place; None where no column's name says so
    perhaps_by  of `others`, the columns that may be that by their values, where `by` is None
    labels      names of the classes
    counts      records by client
    gaps        records that lack a text or a label
    repeats     records that their client has more than once
    left_out    files that cannot be read here
    """

    places: Mapping[str | None, Path]
    task: str
    columns: Mapping[str | None, Mapping[str, str]]
    others: tuple[str, ...]
    by: str | None
    perhaps_by: tuple[str, ...]
    labels: tuple[str, ...]
    counts: Mapping[str, int]
    gaps: int
    repeats: int
    left_out: tuple[str, ...]


def survey(folder: Path) -> SurveyedFolder:
    """Look at a folder, or at one file of records. Raises DataError that says what was found and what is expected."""
    places, left_out = _places(folder)
    rows = {client: _rows(place) for client, place in places.items()}
    alone = {client: _roles(some, client is None) for client, some in rows.items()}
    # Of clients with the same columns the one that tells most: another may have records of one class alone.
    roles = {
        client: max((alone[other] for other in rows if rows[other][0].fields == some[0].fields), key=len)
        for client, some in rows.items()
    }
    tasks = {client: _task(fields) for client, fields in roles.items()}
    task, _ = Counter(tasks.values()).most_common(1)[0]
    if task == "":
        columns = few(next(iter(rows.values()))[0].fields)
        what = "no column looks like a text, a picture or a label"
        raise DataError(f"{folder} has columns {columns}, of which {what}; befit init expects {EXPECTED}")
    kept = {client: _fields_of(task, fields) for client, fields in roles.items()}
    by = roles[None].get("client") if None in places else None
    pooled = None in places and by is None
    used = {column for fields in kept.values() for column in fields.values()} | {by}
    others = tuple(dict.fromkeys(name for some in rows.values() for name in some[0].fields if name not in used))
    records = [(_owner(client, row, by), row, kept[client]) for client, some in rows.items() for row in some]
    full = [
        (owner, _content(row, fields.values()))
        for owner, row, fields in records
        if all(_content(row, _needed(fields, task)))
    ]
    # Of a client without one of the task's columns the rest alone is no record that could be repeated.
    whole = [one for one in full if tasks.get(one[0], task) == task]
    return SurveyedFolder(
        places,
        task,
        {client: {field: name for field, name in kept[client].items() if field != name} for client in places},
        others,
        by,
        tuple(name for name in others if pooled and _are_classes([row.values.get(name) for row in rows[None]])),
        _in_order({_label(row, fields) for _, row, fields in records} - {""}),
        _made_up(len(full)) if pooled else Counter(owner for owner, _ in full),
        len(records) - len(full),
        0 if task == "image-classification" else len(whole) - len(set(whole)),  # pictures are not read here
        tuple(left_out),
    )


def _places(folder: Path) -> tuple[dict[str | None, Path], list[str]]:
    """Client to its place, or None to the one place of everybody's; and the files that are of no use."""
    if (folder.is_file() and suffix_of(folder)) or (folder.is_dir() and is_readable(folder)):
        return {None: folder}, []
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}{looked_from(folder)}")
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    usable = [entry for entry in entries if is_readable(entry) or (entry.is_dir() and _is_client(entry))]
    others = [entry for entry in entries if entry not in usable and entry.suffix != ".md"]
    left_out = [entry.name for entry in others if not _are_seen(entry)]
    stems = [entry.name[: -len(suffix_of(entry))] if entry.is_file() else entry.name for entry in usable]
    if usable and (set(stems) & set(SPLITS) or len(usable) == 1):
        return {None: folder if set(stems) & set(SPLITS) else usable[0]}, left_out
    if not usable:
        kinds = Counter(entry.suffix or ("folder" if entry.is_dir() else "file without ending") for entry in entries)
        content = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4)) or "nothing"
        pictures = " (pictures without classes)" * any(is_picture(entry) for entry in entries)
        raise DataError(f"{folder} has {content}{pictures}; befit init expects {EXPECTED}")
    if repeated := [stem for stem, times in Counter(stems).items() if times > 1]:
        names = " and ".join(entry.name for entry, stem in zip(usable, stems, strict=True) if stem == repeated[0])
        raise DataError(f"{folder} has {names}, so there would be two clients {repeated[0]}: rename or remove one")
    if problems := id_problems(stems):
        raise DataError(f"{folder}: {problems[0]}. Rename its file or folder")
    return dict(zip(stems, usable, strict=True)), left_out


def _is_client(folder: Path) -> bool:
    """Raises DataError for a folder that has a split, and something else wrong."""
    try:
        client_sources({"a": folder})
    except (DataError, OSError):
        if any(is_readable(entry) and entry.name.split(".")[0] in SPLITS for entry in folder.iterdir()):
            raise
        return False
    return True


def _are_seen(entry: Path) -> bool:
    """Whether it is a picture, or a folder of pictures, which records may name."""
    files = [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]
    return bool(files) and all(is_picture(path) for path in files)


def _rows(place: Path) -> list[Row]:
    """All records of one place, those to train on first."""
    (sources,) = client_sources({"a": place}).values()
    order = sorted(sources, key=lambda split: (ALL, "train", "val", "test").index(split))
    return [row for split in order for path in sources[split] for row in read_rows(path, None)]


def _roles(rows: list[Row], pooled: bool) -> dict[str, str]:
    """What columns seem to be, by the words in their names and by their values."""
    values = {name: [row.values.get(name) for row in rows] for name in rows[0].fields}
    roles: dict[str, str] = {}
    if pooled and (name := _named("client", values, lambda some: 1 < _kinds(some) <= len(some) / 2)):
        roles["client"] = name
    if name := _named("group", _without(values, roles), lambda some: 1 < _kinds(some) < len(some)):
        roles["group"] = name
    rest = _without(values, roles)
    if {"chosen", "rejected"} <= set(rest):
        beside = {name: name for name in ("prompt", "instruction", "input") if name in rest}
        asked = _named("instruction", _without(rest, {"chosen": "chosen", "rejected": "rejected"}), _are_texts)
        if asked and not {"prompt", "instruction"} & set(beside):
            beside["prompt"] = asked  # else it would be what both answers begin with
        return {**roles, "chosen": "chosen", "rejected": "rejected", **beside}
    chat = next((name for name in _CHAT if name in rest), None)
    if other := next((name for name in rest if chat is None and _are_turns(rest[name])), None):
        return {**roles, "messages": other, **_seen(_without(rest, {"messages": other}))}
    if chat is not None:
        return {**roles, chat: chat, **_seen(rest)}
    if name := _named("image", rest, _are_pictures):
        roles["image"] = name
    asked, context, output = (_named(role, rest, _are_texts) for role in ("instruction", "input", "output"))
    if output and asked:
        if "image" in roles:
            return {**roles, "question": asked, "answer": output, **{each: each for each in _BESIDE if each in rest}}
        if asked.lower() == "prompt" and not context:  # which is asked as it is, without a template around it
            return {**roles, "prompt": asked, "completion": output}
        return {**roles, "instruction": asked, "output": output, **({"input": context} if context else {})}
    if output and context and "image" not in roles and not _named("label", rest, _are_classes):
        return {**roles, "instruction": context, "output": output}
    rest = _without(values, roles)
    label = _named("label", rest, _are_classes)
    unlabelled = _without(rest, {"label": label or ""})
    pair = next((pair for pair in _PAIRS if all(name in rest and _are_texts(rest[name]) for name in pair)), None)
    if label and pair and "image" not in roles:
        return {**roles, "text": pair[0], "text_pair": pair[1], "label": label}
    text = _named("text", unlabelled, _are_texts) if "image" in roles else _text(unlabelled)
    if not label:
        few_kinds = [name for name in rest if name != text and _are_classes(rest[name])]
        label = min(few_kinds, key=lambda name: _kinds(rest[name]), default=None)
    return {**roles, **({"text": text} if text else {}), **({"label": label} if label else {})}


def _seen(values: Mapping[str, list[Any]]) -> dict[str, str]:
    """What conversations about pictures have beside them; nothing where there is no column of pictures."""
    name = _named("image", values, lambda some: _are_pictures([one for each in some for one in _listed(each)]))
    if name is None:
        return {}
    return {"images" if name == "images" else "image": name, **{each: each for each in _BESIDE if each in values}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(values: Mapping[str, list[Any]]) -> str | None:
    """The column to read: befit's own `text`, else the longest of free text, else one by its name, else the longest."""
    words = [name for name in values if _are_words(values[name]) and not _are_classes(values[name])]
    longest = sorted(words, key=lambda name: sum(len(str(value)) for value in values[name]), reverse=True)
    own = [name for name in words if name == "text"]
    free = [name for name in longest if _are_sentences(values[name])]
    named = _named("text", values, _are_texts)
    return next((name for name in (*own, *free, named, *longest) if name is not None), None)


def _task(roles: Mapping[str, str]) -> str:
    if "image" in roles and "label" in roles:
        return "image-classification"
    if "chosen" in roles:
        return "preference"
    if "question" in roles:
        return "vqa"
    if roles.keys() & {*_CHAT}:
        return "vqa" if {"image", "images"} & roles.keys() else "causal-lm"
    if {"completion", "output"} & roles.keys():
        return "causal-lm"
    if "text" in roles:
        return "text-classification" if "label" in roles else "causal-lm"
    return ""


def _fields_of(task: str, roles: Mapping[str, str]) -> dict[str, str]:
    """The columns that the task reads."""
    unwanted = {
        "text-classification": {"client", "image"},
        "image-classification": {"client", "text"},
        "causal-lm": {"client", "label", "image"},
        "preference": {"client"},
        "vqa": {"client"},
    }
    return {field: name for field, name in roles.items() if field not in unwanted[task]}


def _named(role: str, values: Mapping[str, list[Any]], fits: Any) -> str | None:
    """The first column with one of the role's words in its name, in the order of the words, whose values fit."""
    for word in WORDS[role].split():
        for name in values:
            if word in re.split(r"[\W_]+", name.lower()) and fits(
                [value for value in values[name] if not is_missing(value)]
            ):
                return name
    return None


def _without(values: Mapping[str, list[Any]], roles: Mapping[str, str]) -> dict[str, list[Any]]:
    return {name: some for name, some in values.items() if name not in roles.values()}


def _kinds(values: Iterable[Any]) -> int:
    return len({str(value) for value in values})


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)


def _are_words(values: list[Any]) -> bool:
    """Texts of which most have a letter: in CSV numbers are texts too."""
    return _are_texts(values) and sum(any(map(str.isalpha, value)) for value in values) > len(values) / 2


def _are_sentences(values: list[Any]) -> bool:
    """Texts of which most have several words, unlike names, paths and codes."""
    return sum(len(str(value).split()) > 2 for value in values) > len(values) / 2


def _are_classes(values: list[Any]) -> bool:
    present = [value for value in values if not is_missing(value)]
    labels = [label_value(value) for value in present]
    return None not in labels and 2 <= _kinds(labels) <= min(_CLASSES, len(labels) / 2)


def _are_turns(values: list[Any]) -> bool:
    """Conversations: lists of turns, each with who says what."""
    return all(
        isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)
        for value in values
    )


def _are_pictures(values: list[Any]) -> bool:
    return bool(values) and all(
        isinstance(value, (dict, bytes)) or (isinstance(value, str) and is_picture(Path(value))) for value in values
    )


def _label(row: Row, fields: Mapping[str, str]) -> str:
    """The name of a record's class; empty if it has none."""
    label = label_value(row.values.get(fields.get("label", "")))
    return "" if is_missing(label) else str(label)


def _in_order(labels: set[str]) -> tuple[str, ...]:
    return tuple(sorted(labels, key=int if all(map(str.isdecimal, labels)) else str))


def _made_up(records: int) -> dict[str, int]:
    """Clients of a simulation, where no column says whose a record is, and how many records each has about."""
    count = max(2, min(5, records // 20))
    return {f"client-{at:02}": (records + at) // count for at in range(count)}


def _owner(client: str | None, row: Row, by: str | None) -> str:
    return client if client is not None else str(row.values.get(by or ""))


def _needed(fields: Mapping[str, str], task: str) -> list[str]:
    """The columns whose gaps count. A conversation needs no picture."""
    free = {"group", "input", *_BESIDE, *(("image", "images") if task == "vqa" else ())}
    return [name for field, name in fields.items() if field not in free]


def _content(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    """The values of some columns as texts. A picture in a folder of its class counts by its path."""
    values = (row.values.get(name) for name in names)
    return tuple("" if is_missing(value) else str(value).strip() for value in values)
