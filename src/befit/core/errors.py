"""What can go wrong, by whose doing: `ValueError` for a user's mistake, `RuntimeError` for the world's."""

import difflib
from collections.abc import Iterable


class BefitError(Exception):
    """Base of all errors that befit raises on purpose; the command line prints them without a traceback."""


class ConfigError(BefitError, ValueError):
    """A configuration that cannot work. Collects every problem that was found, one line each."""

    def __init__(self, problems: Iterable[str], where: str = "the configuration") -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in {where}"
        super().__init__("\n  ".join((count, *self.problems)))


class DataError(BefitError, ValueError):
    """Data that cannot be read or used; names the client, file and line where there is one."""


class ModelError(BefitError, ValueError):
    """A model that cannot be found, loaded or adapted."""


class PayloadMismatch(BefitError, ValueError):
    """Arrays whose names, shapes, types or values are not what was declared."""


class IncompatibleAdapters(BefitError, ValueError):
    """Two adapters that may not be merged; names the field that differs."""


class NotTrained(BefitError, RuntimeError):
    """A client that has no adapter to use, because it never took part."""


class NotEnoughReplies(BefitError, RuntimeError):
    """Fewer clients answered than the configuration demands."""


class RunError(BefitError, RuntimeError):
    """A run directory that is missing, incomplete, of another configuration, or cannot be written."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error, or the empty string.

    >>> did_you_mean("fedsaa", ["fedsa", "ditto"])
    ' Did you mean: fedsa?'
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean: {close[0]}?" if close else ""
