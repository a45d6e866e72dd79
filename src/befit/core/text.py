"""Texts from elsewhere, for a log or a terminal."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

PROGRESS = "befit.progress"  # the logger of what takes long and shows nothing else
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, marks of direction, what no font has
_KEPT = set("\n\t\u200c\u200d")  # the last two join letters in many scripts, and emoji
_LONGEST = 500


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
