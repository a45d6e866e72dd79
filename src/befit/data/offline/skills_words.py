"""The words of `skills`: English names of languages, territories, currencies and scripts, built from Babel."""

from __future__ import annotations

import hashlib
import json
import re

from befit.core.errors import DataError
from befit.data.offline.name_strings import BABEL, pinned_babel

__all__ = ["WORDS_SHA256", "english_words", "halves"]

WORDS_SHA256 = "9af9f64a701a86bf5a363a07c3a0b45b99fb733a33db8bb5fd8b3999af88e0b2"


def english_words() -> tuple[str, ...]:
    """The 771 different English names of the CLDR with 4 to 12 ASCII letters, sorted.

    Raises DataError where Babel is missing, of another release, or gives other names than were recorded.
    """
    locale = pinned_babel("skills").Locale.parse("en")
    tables = (locale.languages, locale.territories, locale.currencies, locale.scripts)
    names = {name for table in tables for name in table.values()}
    words = tuple(sorted(name for name in names if re.fullmatch(r"[A-Za-z]{4,12}", name)))
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()
    if digest != WORDS_SHA256:
        raise DataError(
            f"skills: the words that Babel {BABEL} gives here have the hash {digest[:12]}, recorded is "
            f"{WORDS_SHA256[:12]}; install Babel anew: pip install --force-reinstall babel=={BABEL}"
        )
    return words


def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """386 words to train and validate on, and 385 to test on, in an order that their SHA-256 decides."""
    words = sorted(english_words(), key=lambda word: hashlib.sha256(f"skills:{word}".encode()).digest())
    middle = (len(words) + 1) // 2
    return tuple(words[:middle]), tuple(words[middle:])
