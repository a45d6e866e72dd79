"""The strings of `names`: display names of the Unicode CLDR, built from Babel at first use, checked and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from befit.core.errors import DataError, RunError
from befit.core.storage import atomic_write
from befit.core.text import to_install

_LOG = logging.getLogger(__name__)

BABEL = "2.18.0"  # releases change the strings
STRINGS_SHA256 = "584128c550181453549f68ede3cd5c8c8789adaaa9bf99c547adb8c0501f6b9f"
KINDS = ("language", "territory", "currency", "script")
# fi and id stand where XNLI has sw and ur, which have under 40 usable names of scripts.
CLIENT_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fi", "fr", "hi", "id", "ru", "th", "tr", "vi", "zh")
PUBLIC_LANGUAGES = tuple(
    ["it", "pt", "nl", "pl", "uk", "he", "bn", "ta", "ko", "ja", "hu", "cs", "sv", "fa", "zu", "so", "am", "ur", "te"]
)


class Name(NamedTuple):
    """What `key` (of this kind) is called in a language: `Name("de", "territory", "FR", "Frankreich")`."""

    language: str
    kind: str
    key: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.language}-{self.kind}-{self.key}"


def name_strings() -> tuple[Name, ...]:
    """All cleaned strings of the 34 languages, from the cache or built from Babel.

    The cache is `names-<hash>.json` in the directory BEFIT_CACHE, else ~/.cache/befit. Raises DataError where Babel
    is missing, of another release, or gives other strings than the recorded hash stands for.
    """
    path = cache_directory() / f"names-{STRINGS_SHA256[:12]}.json"
    if (content := cached(path)) is not None:
        return decode(content)
    content = encode(build_strings())
    digest = hashlib.sha256(content).hexdigest()
    if digest != STRINGS_SHA256:
        raise DataError(
            f"names: the strings that Babel {BABEL} gives here have the hash {digest[:12]}, recorded is "
            f"{STRINGS_SHA256[:12]}; install Babel anew: pip install --force-reinstall babel=={BABEL}"
        )
    try:
        atomic_write(path, content)
    except RunError as error:
        raise DataError(f"names: {error}. Set BEFIT_CACHE to a folder that can be written") from error
    return decode(content)


def cached(path: Path) -> bytes | None:
    """The content of the cache; None where there is none, or where it is damaged: it can be built again."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"names: cannot read the cache {path}: {error.strerror}. Set BEFIT_CACHE to another folder, or remove it"
        ) from error
    if hashlib.sha256(content).hexdigest() == STRINGS_SHA256:
        return content
    _LOG.warning("%s does not match its hash and is built again", path)
    return None


def cache_directory() -> Path:
    """Where data that was built or fetched is kept between runs."""
    folder = os.environ.get("BEFIT_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "befit"


def build_strings() -> list[Name]:
    """The recipe: names of every language, territory, currency and script in Babel, cleaned per language."""
    babel = pinned_babel("names")
    built: list[Name] = []
    for language in (*CLIENT_LANGUAGES, *PUBLIC_LANGUAGES):
        locale = babel.Locale.parse(language)
        tables = (locale.languages, locale.territories, locale.currencies, locale.scripts)
        names = [
            Name(language, kind, key, unicodedata.normalize("NFC", table[key]))
            for kind, table in zip(KINDS, tables, strict=True)
            for key in sorted(table)
        ]
        built += clean(names)
    return built


def pinned_babel(benchmark: str) -> ModuleType:
    """Babel in the release that `benchmark` is built from. Raises DataError where it is not there."""
    try:
        import babel
    except ImportError:
        raise DataError(
            f"{benchmark} is built from the Babel package, which is not installed: {to_install('benchmarks')}"
        ) from None
    if babel.__version__ != BABEL:
        raise DataError(
            f"{benchmark} is built from Babel {BABEL}, whose strings its hash stands for; Babel "
            f"{babel.__version__} is installed. Use {to_install('benchmarks')}"
        )
    return babel


def clean(names: Iterable[Name]) -> list[Name]:
    """One language's usable names: two characters or more, one kind only, no repeats, and half of the languages.

    Names are compared after casefold. Languages are the largest kind: those are kept whose code has an even hash.

    >>> [name.text for name in clean([Name("en", "language", "th", "Thai"), Name("en", "script", "Thai", "Thai"),
    ...                             Name("en", "territory", "FR", "France"), Name("en", "territory", "XX", "?")])]
    ['France']
    """
    long = [name for name in names if len(name.text) >= 2]
    kinds: dict[str, set[str]] = {}
    for name in long:
        kinds.setdefault(name.text.casefold(), set()).add(name.kind)
    kept: dict[str, Name] = {}
    for name in long:
        if len(kinds[name.text.casefold()]) == 1:
            kept.setdefault(name.text.casefold(), name)
    return [name for name in kept.values() if name.kind != "language" or name_hash(name.key) % 2 == 0]


def name_hash(text: str) -> int:
    """The first 32 bits of the SHA-256 of `text`.

    >>> name_hash("territory:FR") % 12
    9
    """
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def fold(text: str) -> str:
    """What two strings are compared by: NFKC, then casefold."""
    return unicodedata.normalize("NFKC", text).casefold()


def encode(names: Iterable[Name]) -> bytes:
    return json.dumps(list(names), ensure_ascii=False, separators=(",", ":")).encode()


def decode(content: bytes) -> tuple[Name, ...]:
    return tuple(Name(*row) for row in json.loads(content))
