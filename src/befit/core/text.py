"""Texts from elsewhere, for a log or a terminal, and sizes in words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROGRESS = "befit.progress"  # the logger of what takes long and shows nothing else
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, marks of direction, what no font has
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters in many scripts, and emoji
_LONGEST = 500


def looked_from(path: Path) -> str:
    """What to add to a relative path that is not there: which folder it counts from."""
    return "" if path.is_absolute() else f" (looked from {Path.cwd()})"


def visible(text: str) -> str:
    """The text with every character that a terminal would act on, or that hides others, as its escape.

    >>> print(visible("a\\x1b[2Jb\\u202ec"))
    a\\x1b[2Jb\\u202ec
    """
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if letter not in _KEPT and unicodedata.category(letter) in _INVISIBLE
        else letter
        for letter in text
    )


def readable(value: Any, longest: int = _LONGEST) -> str:
    """A text from elsewhere for a log or a terminal: one line, shortened, without control characters.

    >>> readable("a\\n\\x1b[2Jb")
    'a [2Jb'
    """
    text = re.sub(r"\s+", " ", str(value)[: 4 * longest])
    text = "".join(letter for letter in text if letter.isprintable())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def to_install(extra: str) -> str:
    """What brings an extra. Not by befit's name: that is none on the package index, where anybody could take it.

    >>> to_install("flower")
    "pip install '.[flower]' in the clone"
    """
    return f"pip install '.[{extra}]' in the clone"


def first_of(names: Iterable[str], most: int = 20, between: str = ", ") -> str:
    """The first of some names or sentences, and how many more there are.

    >>> first_of("abc"), first_of("abcd", 2), first_of("abcd", 3, "; ")
    ('a, b, c', 'a, b and 2 more', 'a; b; c; and 1 more')
    """
    every = [*names]
    text, more = between.join(every[:most]), len(every) - most
    return text if more <= 0 else f"{text}{' ' if between == ', ' else between}and {more} more"


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one of dotted names.

    >>> dotted({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def size_text(count: float) -> str:
    """A count with a decimal prefix, three significant digits.

    >>> size_text(917), size_text(2293760), size_text(3212749824)
    ('917', '2.29 M', '3.21 G')
    """
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            scaled = count / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {prefix}"
    return f"{count:.0f}"


def with_unit(count: float, unit: str) -> str:
    """The same with a unit.

    >>> with_unit(917, "B"), with_unit(2293760, "B")
    ('917 B', '2.29 MB')
    """
    text = size_text(count)
    return f"{text}{unit}" if " " in text else f"{text} {unit}"
