"""Several mistakes in one error, so that a file is not corrected line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from befit.errors import DataError

__all__ = ["gather", "listed"]

SHOWN = 5
One = TypeVar("One")
Made = TypeVar("Made")


def gather(make: Callable[[One], Made], values: Iterable[One]) -> list[Made]:
    """`make` of every value. Raises one DataError that lists those of all values, the first five in full."""
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
    """The first five, one a line, and how many more there are.

    >>> listed(["a"]), listed("abcdefg")[-14:]
    ('a', 'e\\n  and 2 more')
    """
    more = len(problems) - SHOWN
    return "\n  ".join([*problems[:SHOWN], *([f"and {more} more"] if more > 0 else [])])
