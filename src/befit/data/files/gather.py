"""Several mistakes in one error, so that a file is not corrected line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from befit.core.errors import DataError

__all__ = ["gather", "listed"]

SHOWN = 5
_PLACE = re.compile(r"(?P<path>.*?), (?P<kind>line|record|row) (?P<number>\d+): (?P<reason>.*)", re.DOTALL)
One = TypeVar("One")
Made = TypeVar("Made")


def gather(make: Callable[[One], Made], values: Iterable[One]) -> list[Made]:
    """`make` of every value. Raises one DataError that lists those of all values, the first five in full, and each that
    differs from another by its record alone only once."""
    made: list[Made] = []
    problems: list[str] = []
    for value in values:
        try:
            made.append(make(value))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(listed(problems))
    return made


def listed(problems: Sequence[str]) -> str:
    """The first five, one a line, and how many more there are. What is wrong with several records of a file is one.

    >>> listed(["a"]), listed("abcdefg")[-14:]
    ('a', 'e\\n  and 2 more')
    >>> listed([f"f.csv, line {number}: there is no text" for number in range(1, 9)])
    'f.csv, line 1: there is no text (8 records: line 1, 2, 3, 4, 5 and 3 more)'
    """
    problems = _folded(problems)
    more = len(problems) - SHOWN
    return "\n  ".join([*problems[:SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _folded(problems: Sequence[str]) -> list[str]:
    """The same reason at several places of one file, said at the first of them with the count and the first few."""
    numbers: dict[tuple[str, str, str] | str, list[str]] = {}
    first: dict[tuple[str, str, str] | str, str] = {}
    for problem in problems:
        found = _PLACE.fullmatch(problem)
        key = (found["path"], found["kind"], found["reason"]) if found else problem
        first.setdefault(key, problem)
        numbers.setdefault(key, []).append(found["number"] if found else "")
    said = []
    for key, places in numbers.items():
        text = first[key]
        if len(places) > 1 and isinstance(key, tuple):
            more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
            text += f" ({len(places)} records: {key[1]} {', '.join(places[:SHOWN])}{more})"
        said.append(text)
    return said
