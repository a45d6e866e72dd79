r"""Values for some modules of an adapter, by patterns of their names, as PEFT's `rank_pattern` has them.

PEFT takes a key P for the regular expression `(.*\.)?(P)$`, and the first that matches counts. Adapters come from
elsewhere, and Python's engine takes for ever on some expressions, such as `(a+)+!`. So a key that is more than a name
is matched here by the set of all places that a match may have reached (Thompson 1968), which takes at most length of
pattern times length of name. What is read of regular expressions:

    names . ^ $ \d \w \. [a-z] [^a-z] (a|b) * + ?    with no repetition within another

and the work of one adapter is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_LONGEST = 500  # of a pattern, in characters
_MOST_GROUPS = 20
_MOST_WORK = 500_000_000  # characters of patterns times characters of names, about a second
_STEP = 100  # times as long as a name
_NAME = re.compile(r"\^?(?:[\w-]|\\?\.|\\-)+\$?")
_EXACT = re.compile(r"\^((?:[\w-]|\\\.|\\-)+)\$?")
_CLASSES: Mapping[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda letter: letter == "_" or letter.isalnum(),
}
Part = Callable[[str, set[int]], set[int]]  # from the places where it may begin in a text to those where it may end


class Patterns:
    """Patterns ready to be matched. Raises ValueError for one that is not read here, naming it."""

    def __init__(self, by_pattern: Mapping[str, Any]) -> None:
        self._exact: dict[str, int] = {}
        self._others: list[tuple[int, Callable[[str], bool]]] = []
        self._values = list(by_pattern.values())
        self._work = 0
        for index, key in enumerate(by_pattern):
            if len(key) > _LONGEST:
                raise ValueError(f"the pattern {key[:40]}… has {len(key)} characters, and at most {_LONGEST} are read")
            if match := _EXACT.fullmatch(key):
                self._exact.setdefault(match[1].replace("\\", ""), index)
            elif _NAME.fullmatch(key):
                self._work += len(key)
                self._others.append((index, _by_name(key)))
            else:
                self._work += _STEP * len(key)
                self._others.append((index, _by_places(key)))

    def check_work(self, names: Collection[str]) -> None:
        """Raise ValueError where matching all names would take long."""
        if self._work * sum(map(len, names)) > _MOST_WORK:
            raise ValueError(
                f"{len(self._values)} patterns for {len(names)} modules take too long to match; "
                r"write names in full, such as ^model\.layers\.0\.q_proj"
            )

    def value(self, name: str, default: Any) -> Any:
        """The value of the first pattern that matches."""
        exact = self._exact.get(name, len(self._values))
        for index, matches in self._others:
            if index > exact:
                break
            if matches(name):
                return self._values[index]
        return self._values[exact] if exact < len(self._values) else default


def _by_name(key: str) -> Callable[[str], bool]:
    """Without Python's engine too, which takes longer to prepare a name than to compare it with a thousand."""
    whole, parts, length = key.startswith("^"), [(0, "")], 0
    for letter in re.findall(r"\\.|[^\\]", key.removeprefix("^").removesuffix("$")):
        length += 1
        if letter == ".":  # any character
            parts.append((length, ""))
        else:
            at, text = parts[-1]
            parts[-1] = at, text + letter[-1]

    def matches(name: str) -> bool:
        start = len(name) - length
        if start < 0 or (start and (whole or name[start - 1] != ".")):
            return False
        return all(name.startswith(text, start + at) for at, text in parts)

    return matches


def _by_places(key: str) -> Callable[[str], bool]:
    part = _Reader(key).whole()
    return lambda name: len(name) in part(name, {0} | {end + 1 for end, letter in enumerate(name) if letter == "."})


class _Reader:
    """A pattern from left to right."""

    def __init__(self, key: str) -> None:
        self._key, self._at, self._groups = key, 0, 0

    def whole(self) -> Part:
        part, _ = self._choice()
        if self._at < len(self._key):
            raise self._wrong("a ) without its (")
        return part

    def _choice(self) -> tuple[Part, bool]:
        """Alternatives up to the end of their group, and whether any of them repeats something."""
        options = [self._row()]
        while self._next("|"):
            options.append(self._row())
        return _either([part for part, _ in options]), any(repeats for _, repeats in options)

    def _row(self) -> tuple[Part, bool]:
        parts: list[Part] = []
        repeats = False
        while self._at < len(self._key) and self._key[self._at] not in "|)":
            part, inside = self._parse_atom()
            if self._at < len(self._key) and self._key[self._at] in "*+?":
                sign = self._key[self._at]
                self._at += 1
                if self._key[self._at - 2] in "^$" and self._key[self._at - 3 : self._at - 2] != "\\":
                    raise self._wrong(sign)
                if inside and sign != "?":
                    raise self._wrong("a repetition within another")
                repeats |= sign != "?"
                part = _repeated(part, sign)
                self._next("?")  # taking as little as possible changes nothing for whole names
            repeats |= inside
            parts.append(part)
        return _row_of(parts), repeats

    def _parse_atom(self) -> tuple[Part, bool]:
        letter = self._take()
        if letter == "(":
            if self._next("?") and not self._next(":"):
                raise self._wrong("(?")
            self._groups += 1
            if self._groups > _MOST_GROUPS:
                raise self._wrong(f"more than {_MOST_GROUPS} groups")
            part, repeats = self._choice()
            if not self._next(")"):
                raise self._wrong("a ( without its )")
            return part, repeats
        if letter == "^":
            return lambda text, at: at & {0}, False
        if letter == "$":
            return lambda text, at: at & {len(text)}, False
        if letter in "*+?{":
            raise self._wrong(letter)
        if letter == "[":
            return _letter(self._set()), False
        if letter == ".":
            return _letter(lambda other: True), False
        return _letter(self._escaped() if letter == "\\" else letter.__eq__), False

    def _set(self) -> Callable[[str], bool]:
        outside = self._next("^")
        if self._next("]"):
            raise self._wrong("[]")
        tests: list[Callable[[str], bool]] = []
        while not self._next("]"):
            letter = self._take()
            if letter == "\\":
                tests.append(self._escaped())
            elif self._key[self._at : self._at + 1] == "-" and self._key[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._take()
                tests.append(lambda other, low=letter, high=high: low <= other <= high)
            else:
                tests.append(letter.__eq__)
        return lambda other: any(test(other) for test in tests) is not outside

    def _escaped(self) -> Callable[[str], bool]:
        letter = self._take()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.isalnum():
            raise self._wrong(f"\\{letter}")
        return letter.__eq__

    def _next(self, letter: str) -> bool:
        """Whether this comes next; then it is taken."""
        if self._key[self._at : self._at + 1] != letter:
            return False
        self._at += 1
        return True

    def _take(self) -> str:
        if self._at == len(self._key):
            raise self._wrong("an end too early")
        self._at += 1
        return self._key[self._at - 1]

    def _wrong(self, what: str) -> ValueError:
        return ValueError(
            f"the pattern {self._key[:80]!r} has {what}, which is not read here; write the modules' names"
        )


def _letter(test: Callable[[str], bool]) -> Part:
    return lambda text, at: {place + 1 for place in at if place < len(text) and test(text[place])}


def _row_of(parts: Sequence[Part]) -> Part:
    def run(text: str, at: set[int]) -> set[int]:
        for part in parts:
            at = part(text, at)
        return at

    return run


def _either(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else lambda text, at: set().union(*(part(text, at) for part in parts))


def _repeated(part: Part, sign: str) -> Part:
    def run(text: str, at: set[int]) -> set[int]:
        new = reached = part(text, at)
        while new and sign != "?":
            new = part(text, new) - reached
            reached = reached | new
        return reached if sign == "+" else reached | at

    return run
