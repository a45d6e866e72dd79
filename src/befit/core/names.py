"""Ids of clients: any printable name, and the name of the folder or file behind it; and names of classes."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

LONGEST = 200  # letters of an id
_LONGEST_FOLDER = 150  # bytes: the longest name made of it, a temporary file's, must stay below the 255 of file systems
LONGEST_CLASS = 1000  # letters of a class's name
RULE = "must be a printable name of at most 200 letters that does not begin or end with a space"


def several(**names: object) -> None:
    """Raise TypeError that names the argument which is a text where several names belong: its letters would be taken
    for them.

    >>> several(active=("shared",))
    >>> several(active="shared")
    Traceback (most recent call last):
    TypeError: active must be several names, such as ('shared',), not 'shared'
    """
    for name, value in names.items():
        if isinstance(value, str):
            raise TypeError(f"{name} must be several names, such as {(value,)!r}, not {value!r}")


def is_id(value: str) -> bool:
    """Whether a text can be a client's id.

    >>> is_id("Köln, Haus 3"), is_id("東京"), is_id(""), is_id("a\\tb")
    (True, True, False, False)
    """
    return value.isprintable() and value == value.strip() and 0 < len(value) <= LONGEST


def is_class(name: str) -> bool:
    """Whether a text can name a class. Names of classes are written into logs, reports and the pages of adapters, and
    befit's own marks there have control characters.

    >>> is_class("Grippe, leicht"), is_class(" "), is_class("a\\tb")
    (True, False, False)
    """
    return name.isprintable() and 0 < len(name.strip()) <= LONGEST_CLASS


def id_problems(ids: Iterable[str]) -> list[str]:
    """Which of these ids cannot be used, and why; nothing where all can.

    Two that look alike, or that differ in their case alone, are one name to some file systems and to most people.

    >>> id_problems(["Köln", "KÖLN", "a/b"])
    ["'Köln' and 'KÖLN' are the same name but for case or the way of writing accents; rename one"]
    """
    problems: list[str] = []
    spellings: dict[str, str] = {}
    for name in ids:
        if not is_id(name):
            shown = ascii(name) if len(name) <= LONGEST else f"{name[:20]!a}… ({len(name)} letters)"
            problems.append(f"{shown} is no client's id: it {RULE}")
            continue
        other = spellings.setdefault(_alike(name), name)
        if other != name:
            problems.append(
                f"{other!r} and {name!r} are the same name but for case or the way of writing accents; rename one"
            )
    return problems


def folder_name(client: str) -> str:
    """The name of a client's folder, or of its files before their ending: different for different clients.

    ASCII letters, digits, '.', '_' and '-' stay, so most ids are their own name; of all else every byte of UTF-8 is
    written %XX, and so is a dot at the beginning or the end. A name that is too long ends in '+' and a hash of the id.

    >>> folder_name("client-01"), folder_name("Haus 3"), folder_name("..")
    ('client-01', 'Haus%203', '%2E%2E')
    """
    name = quote(client, safe="").replace("~", "%7E")
    name = "%2E" + name[1:] if name.startswith(".") else name
    name = name[:-1] + "%2E" if name.endswith(".") else name
    if len(name) <= _LONGEST_FOLDER:
        return name
    mark = "+" + hashlib.sha256(client.encode()).hexdigest()[:32]
    return name[: _LONGEST_FOLDER - len(mark)] + mark


def _alike(name: str) -> str:
    """The same for names that a file system may take for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def method_folder(run: Path, label: str, own: str) -> Path:
    """Where a run's directory has what one of its methods leaves: that called `own` at the top, a baseline in
    baselines/."""
    return run if label == own else run / "baselines" / label
