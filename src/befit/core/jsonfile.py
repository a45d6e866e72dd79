"""JSON from elsewhere, within limits: whatever it holds, it is a value soon, or refused in one sentence."""

from __future__ import annotations

import json
import re
from typing import Any

from befit.core.errors import BefitError
from befit.core.text import readable

MOST_LEVELS = 64  # of lists and mappings within each other, in YAML too
MOST_DIGITS = 100  # of a whole number: above 308 it is no float, above 4,300 Python refuses to read it
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    data: bytes | str,
    where: str,
    kind: type[BefitError],
    most_bytes: int | None = None,
    halves: bool = False,
    once: bool = False,
) -> Any:
    """The value of one JSON document in UTF-8, with or without a byte order mark; NaN and infinity are numbers here.

    where       what the error begins with: a file, perhaps with its line
    kind        the error's class
    most_bytes  for documents that are small unless something is wrong
    halves      let halves of surrogate pairs pass, which no file and no terminal can hold, in texts that are checked
                when they are used
    once        refuse an object that has a key twice, of which any reader might take either; in a list it is named by
                its place there

    Raises `kind` for anything else, for lists and mappings more than 64 levels deep, for whole numbers of more than 100
    digits, and for halves of surrogate pairs unless they may pass.

    >>> parse_json(b'{"rank": 8}', "adapter_config.json", BefitError)
    {'rank': 8}
    """
    if most_bytes is not None and len(data) > most_bytes:
        raise kind(f"{where}: has {len(data)} bytes, and at most {most_bytes} are read of a file of this kind")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    text = text.removeprefix("\ufeff")
    try:
        value = (_ONCE if once else _DECODER).decode(text)
        if text.count("[") + text.count("{") > MOST_LEVELS and not _is_shallow(value):
            raise RecursionError
        if not halves and _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise kind(f"{where}: is not JSON ({error.msg} at {line}column {error.colno})") from error
    except _Twice as error:
        record = _first_refused(text)
        raise kind(f"{where}{f', record {record}' if record else ''}: {error}") from error
    except UnicodeEncodeError as error:
        broken = f"\\u{ord(error.object[error.start]):04x}"
        raise kind(f"{where}: holds {broken}, half of a surrogate pair, which is no character; remove it") from error
    except RecursionError as error:
        raise kind(f"{where}: is nested more than {MOST_LEVELS} levels deep; make it flatter") from error
    except ValueError as error:
        raise kind(f"{where}: {error}") from error
    return value


class _Twice(ValueError):
    """An object that has a key twice."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Twice(f'has "{readable(twice, 50)}" twice in one object; remove one of them')
    return values


def _first_refused(text: str) -> int:
    """The place, from 1, of the first value in a list that has a key twice; 0 where the document is no list.

    Looked for only once there is one: a decoder says of no object where it stands.
    """
    if not text.lstrip().startswith("["):
        return 0
    at, place = text.index("[") + 1, 1
    while True:
        while text[at] in " \t\n\r":
            at += 1
        try:
            _, at = _ONCE.raw_decode(text, at)
        except _Twice:
            return place
        at, place = text.index(",", at) + 1, place + 1


def whole_number(digits: str) -> int:
    """Raises ValueError for more digits than a number from elsewhere may have."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"holds a whole number of {len(digits)} digits, and at most {MOST_DIGITS} are read; write it as text"
        )
    return int(digits)


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return True
    return False


_DECODER = json.JSONDecoder(parse_int=whole_number)
_ONCE = json.JSONDecoder(parse_int=whole_number, object_pairs_hook=_each_once)
