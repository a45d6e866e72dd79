"""How numbers and names are written, in the terminal, in Markdown and in HTML alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from befit.core.metrics import CLASS_METRICS
from befit.core.text import with_unit
from befit.tasks.text_metrics import LIKELIHOOD, METRICS
from befit.tasks.vqa_metrics import VQA_METRICS

NOTHING = "\N{EN DASH}"  # a cell without a value

MINUS = "\N{MINUS SIGN}"

# Metrics between 0 and 1 that people read as percentages; their differences are points.
_SHARES = (*CLASS_METRICS, "f1", "rouge2", "em", "unparsable", "preference_accuracy", *METRICS, *VQA_METRICS)

# Those of them that count examples, each right or wrong: only these have a binomial standard error.
_COUNTS = ("accuracy", "exact_match", "em", "choice_parse", *LIKELIHOOD)


def is_share(metric: str) -> bool:
    """Whether the metric lies between 0 and 1 and is written in percent."""
    return metric in _SHARES


def counts_examples(metric: str) -> bool:
    """Whether the metric is the share of the test examples that are right.

    >>> [counts_examples(metric) for metric in ("accuracy", "token_accuracy", "rougeL", "loss")]
    [True, False, False, False]
    """
    return metric in _COUNTS


def score_of(row: Mapping[str, Any], metric: str) -> float | None:
    """The metric of one client's row, or None where it was not measured or is not a finite number."""
    value = row.get(metric)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def score_text(value: float | None, metric: str) -> str:
    """A score: shares in percent with one decimal, anything else with four significant digits.

    >>> score_text(0.8512, "accuracy"), score_text(1.23456, "loss"), score_text(None, "accuracy")
    ('85.1%', '1.235', '–')
    """
    if value is None:
        return NOTHING
    # 31 of 80 may come as 0.3875 or 0.38749999999999996, by how it was added up, and is 38.8 % in both cases.
    return f"{round(100 * value, 9):.1f}%" if is_share(metric) else decimal_text(value)


def gain_text(value: float | None, metric: str, signed: bool = True) -> str:
    """A difference of two scores: percentage points for shares. What rounds to zero has no sign.

    >>> gain_text(0.0213, "accuracy"), gain_text(-0.004, "accuracy"), gain_text(0.0001, "accuracy")
    ('+2.1', '−0.4', '0.0')
    """
    if value is None:
        return NOTHING
    text = f"{100 * abs(value):.1f}" if is_share(metric) else decimal_text(abs(value))
    if not signed or float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def p_text(p: float | None) -> str:
    """A p-value: three decimals, below 0.001 its order of magnitude.

    >>> p_text(0.0421), p_text(0.00004), p_text(None)
    ('0.042', '4e-05', '–')
    """
    return NOTHING if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def decimal_text(value: Any) -> str:
    """Four significant digits; whole numbers as they are.

    >>> decimal_text(0.653023), decimal_text(411120028.03), decimal_text(30.0), decimal_text(None)
    ('0.653', '4.111e+08', '30', '–')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return NOTHING if value is None else plain(str(value))
    if not math.isfinite(value):
        return str(value)
    text = f"{abs(value):.0f}" if value == int(value) and abs(value) < 1e6 else f"{abs(value):.4g}"
    return MINUS + text if value < 0 else text


def bytes_text(count: float | None) -> str:
    """Bytes in decimal units (1 MB = 1e6 bytes), three significant digits.

    >>> bytes_text(0), bytes_text(2048), bytes_text(707360), bytes_text(41e9), bytes_text(7.71e12)
    ('0 B', '2.05 kB', '707 kB', '41.0 GB', '7.71 TB')
    """
    return NOTHING if count is None else with_unit(count, "B")


def seconds_text(seconds: float | None) -> str:
    """A duration.

    >>> seconds_text(0.024), seconds_text(3.79), seconds_text(75.2), seconds_text(3661)
    ('0.02 s', '3.8 s', '1 min 15 s', '1 h 01 min')
    """
    if seconds is None:
        return NOTHING
    if not abs(seconds) < 1e12:  # what a client said before such were refused
        return f"{decimal_text(seconds)} s"
    if round(seconds) >= 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min"
    if round(seconds) >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.{2 if seconds < 1 else 1}f} s"


def duration_text(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> duration_text(75), duration_text(3661)
    ('1:15', '1:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count_text(count: int, noun: str) -> str:
    """How many of something, in words.

    >>> count_text(1, "client"), count_text(500, "client")
    ('1 client', '500 clients')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranges_text(numbers: Iterable[int]) -> str:
    """Whole numbers, three or more in a row by the first and the last; as they are ordered.

    >>> ranges_text([0, 1, 2, 3, 10, 20, 21])
    '0 to 3, 10, 20, 21'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def listing(names: list[str]) -> str:
    """Names as a sentence lists them.

    >>> listing(["a"]), listing(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def plain(text: str) -> str:
    """The text with everything unprintable replaced: client names come from outside and go to terminals and into XML.

    >>> plain("c\\x1b[31m\\nd")
    'c�[31m�d'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
