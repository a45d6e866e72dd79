"""What can go wrong, by whose doing: `ValueError` for a user's mistake, `RuntimeError` for the world's."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")
UNNAMED = "the configuration"
_SHOWN = 5
_MOST_SHOWN = 100
_BRIEF = 300  # characters of what another library says
_MOST_PROBLEMS = 1000  # after which reading stops: nobody mends so many by hand
_PLACE = re.compile(r"(?P<path>.*?), (?P<kind>line|record|row) (?P<number>\d+): (?P<reason>.*)", re.DOTALL)
_AT_CLIENT = re.compile(
    r"client (?P<client>[^:]+): .*?, (?:line|record|row) \d+: (?P<reason>.*?)(?: \(\d+ records: [^)]*\))?"
)


class BefitError(Exception):
    """Base of all errors that befit raises on purpose; the command line prints them without a traceback."""


class ConfigError(BefitError, ValueError):
    """A configuration that cannot work. Collects every problem that was found, one line each.

    where  the file or the part of it; the command line puts in the name of the file where it is left out
    in_a_line  the text for where lines cannot be broken
    """

    def __init__(self, problems: Iterable[str], where: str = UNNAMED) -> None:
        self.problems, self.where = tuple(problems), where
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in {where}"
        more = len(self.problems) - _MOST_SHOWN
        rest = (f"and {more} more",) if more > 0 else ()
        shown = (*self.problems[:_MOST_SHOWN], *rest)
        self.in_a_line = f"{count}: {'; '.join(shown)}"
        super().__init__("\n  ".join((count, *shown)))


class DataError(BefitError, ValueError):
    """Data that cannot be read or used; names the client, file and line where there is one.

    Files below the current folder are named as seen from it, which is how most configurations name them.
    """

    def __init__(self, text: str) -> None:
        here = os.path.join(os.getcwd(), "")
        super().__init__(text.replace(here, "") if len(here) > 1 else text)


class ModelError(BefitError, ValueError):
    """A model that cannot be found, loaded or adapted."""


class NotDivisible(ModelError):
    """Something of a model that is of several clients at once and cannot be told apart."""


class PayloadMismatch(BefitError, ValueError):
    """Arrays whose names, shapes, types or values are not what was declared."""


class IncompatibleAdapters(BefitError, ValueError):
    """Two adapters that may not be merged; names the field that differs."""


class NotTrained(BefitError, RuntimeError):
    """A client that has no adapter to use, because it never took part."""


class TrainingDiverged(BefitError, RuntimeError):
    """A loss, or what a training came to, is not a finite number any more."""


class NotFinite(PayloadMismatch):
    """Arrays or numbers that are not finite, as where a training has diverged."""


# Kinds of failures by which studies know that a training came to nothing, as it will again.
DIVERGED = (TrainingDiverged.__name__, NotFinite.__name__, FloatingPointError.__name__)


class NotEnoughReplies(BefitError, RuntimeError):
    """Fewer clients answered than the configuration demands."""


class RunError(BefitError, RuntimeError):
    """A run directory that is missing, incomplete, of another configuration, or cannot be written."""


class Damaged(RunError):
    """A file that a run goes on from, and that is missing or not as it was written; names the file."""


# Of this machine, not of what was computed: another try may well succeed.
PASSING = (RunError, MemoryError, OSError)


def nothing_to_deploy(client: str, adapter: str) -> NotTrained:
    """For a client whose adapter in the slot of this name was never made."""
    made = "it never completed the stage that makes it, so there is nothing to deploy"
    return NotTrained(f"client {client} has no {adapter!r} adapter: {made}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error, or the empty string. Capitals do not count.

    >>> did_you_mean("fedsaa", ["fedsa", "ditto"]), did_you_mean("FedIT", ["fedit"])
    (' Did you mean: fedsa?', ' Did you mean: fedit?')
    """
    by_letters = {name.casefold(): name for name in reversed([*known])}
    close = difflib.get_close_matches(word.casefold(), by_letters, n=1, cutoff=0.6)
    return f" Did you mean: {by_letters[close[0]]}?" if close else ""


def brief(error: BaseException | str) -> str:
    """What an error of another library says, for a sentence of ours: its first line, printable and shortened; else its
    class.

    >>> brief(ValueError("x is bad\\n  here is all of x")), brief(EOFError())
    ('x is bad', 'EOFError')
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][: _BRIEF + 1]
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return line if len(line) <= _BRIEF else f"{line[: _BRIEF - 1]}…"


def refusal(error: BaseException) -> str:
    """Why something that was sent cannot be used; a mistake of ours in reading it is told by its kind as well.

    >>> refusal(PayloadMismatch("an array is missing")), refusal(KeyError("a"))
    ('an array is missing', "KeyError: 'a'")
    """
    kind = "" if isinstance(error, PayloadMismatch) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def map_all(function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
    """`function` of every value. Where any raises a DataError, one DataError lists what is wrong with all of them.

    So a file with several mistakes is corrected in one go. See `listed` for how they are shortened.
    """
    results: list[Result] = []
    problems: list[str] = []
    for value in values:
        try:
            results.append(function(value))
        except DataError as error:
            problems.append(str(error))
            if len(problems) == _MOST_PROBLEMS:
                raise DataError(f"{listed(problems)}\n  and perhaps more: reading stopped here") from error
    if problems:
        raise DataError(listed(problems))
    return results


def listed(problems: Sequence[str]) -> str:
    """The first five, one a line, and how many more there are. The same problem of several records counts as one, and
    so does that of several clients.

    >>> listed(["a"]), listed("abcdefg")[-14:]
    ('a', 'e\\n  and 2 more')
    >>> listed([f"f.csv, line {number}: there is no text" for number in range(1, 9)])
    'f.csv, line 1: there is no text (8 records: line 1, 2, 3, 4, 5 and 3 more)'
    >>> listed([f"client {name}: {name}.csv, row 1: there is no text" for name in "ab"])
    'client a: a.csv, row 1: there is no text (2 clients: a, b)'
    """
    first: dict[tuple[str, ...], str] = {}
    numbers: dict[tuple[str, ...], list[str]] = {}
    for problem in problems:
        client, place = _AT_CLIENT.fullmatch(problem), _PLACE.fullmatch(problem)
        key, number = (problem,), ""
        if client:
            key, number = ("clients", client["reason"]), client["client"]
        elif place:
            key, number = ("records", place["path"], place["kind"], place["reason"]), place["number"]
        first.setdefault(key, problem)
        numbers.setdefault(key, []).append(number)
    lines = []
    for key, places in numbers.items():
        text = first[key]
        if len(places) > 1 and len(key) > 1:
            more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
            kind = f"{key[2]} " if key[0] == "records" else ""
            text += f" ({len(places)} {key[0]}: {kind}{', '.join(places[:_SHOWN])}{more})"
        lines.append(text)
    more = len(lines) - _SHOWN
    return "\n  ".join([*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
