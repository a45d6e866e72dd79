"""Checks of the numbers and texts that a site reports about itself and its work.

Arrays are the guard's business (`befit.protocol.guard`); these are the numbers and texts beside them, which go
into logs, results and the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from befit.core.errors import PayloadMismatch
from befit.core.text import readable
from befit.core.values import Cost, Scalar

Header = Mapping[str, Any]
_MOST_EXAMPLES, _MOST_NAMES, _LONGEST_NAME = 2**31, 1000, 200
# The other keys of a client's row of results; a metric may not have such a name.
COLUMNS = frozenset(
    {
        "adapter",
        "baselines",
        "bytes_down",
        "bytes_scoring",
        "bytes_up",
        "diagnostics",
        "examples",
        "family",
        "gain",
        "gain_over_local",
        "info",
        "reason",
        "seconds",
        "train_examples",
        "updates",
    }
)


def hello(header: Header) -> dict[str, Any]:
    """A site's answer to `hello`: its client, backbone, data, version, and numbers of train, val and test examples."""
    texts: dict[str, Any] = {key: _text(header, key) for key in ("client", "backbone", "data", "version")}
    counts = header.get("examples")
    if not isinstance(counts, list) or len(counts) != 3:
        raise PayloadMismatch(f"its numbers of train, val and test examples are malformed: {readable(counts)}")
    return {**texts, "examples": [_count(number, "examples") for number in counts]}


def scalars(header: Header) -> dict[str, Scalar]:
    """The plain numbers of a payload, of the types that a payload may have."""
    values = _mapping(header, "scalars")
    plain = (bool, int, float, str)
    for name, value in values.items():
        if not isinstance(value, plain) and not (isinstance(value, list) and all(isinstance(v, plain) for v in value)):
            raise PayloadMismatch(f"its number {readable(name)} is {readable(value)}, a type that payloads cannot have")
    return dict(values)


def report(header: Header) -> dict[str, float]:
    """Numbers for the log; what is not finite is logged as that."""
    return {name: _number(value, name) for name, value in _mapping(header, "report").items()}


def metrics(header: Header, headline: str) -> dict[str, float]:
    """A score: finite numbers, the headline among them, none of the name of another column of the results."""
    values = _mapping(header, "metrics")
    if headline not in values:
        raise PayloadMismatch(f"its score has no {headline}; it has {readable(', '.join(values)) or 'nothing'}")
    if taken := values.keys() & COLUMNS:
        raise PayloadMismatch(f"its score has a metric {min(taken)!r}, which is no metric's name")
    numbers = {name: _number(value, name) for name, value in values.items()}
    if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise PayloadMismatch(f"its {readable(wrong[0])} is {numbers[wrong[0]]}")
    return numbers


def examples(header: Header) -> int:
    """The number of examples behind a score."""
    return _count(header.get("examples"), "examples")


def cost(header: Header, up: int, down: int) -> Cost:
    """Bytes as counted here; seconds and memory as the site reports them."""
    reported = _mapping(header, "cost")
    seconds, memory = (_number(reported.get(key), key) for key in ("seconds", "peak_memory_mib"))
    if not (0 <= seconds < math.inf and 0 <= memory < math.inf):
        raise PayloadMismatch(f"it reports impossible costs: {seconds} s and {memory} MiB")
    return Cost(up, down, seconds, memory)


def _text(header: Header, key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str) or len(value) > _LONGEST_NAME or not value.isprintable():
        raise PayloadMismatch(f"its {key} is {readable(value)}, which is not a valid name")
    return value


def _mapping(header: Header, key: str) -> Mapping[str, Any]:
    value = header.get(key)
    if not isinstance(value, Mapping):
        raise PayloadMismatch(f"its {key} is malformed: {readable(value)}")
    if len(value) > _MOST_NAMES:
        raise PayloadMismatch(f"its {key} has {len(value)} names, more than {_MOST_NAMES}")
    for name in value:
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise PayloadMismatch(f"its {key} has an invalid name: {readable(name)}")
    return value


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, (int, float)):
            return float(value)
    except OverflowError:
        pass
    raise PayloadMismatch(f"its {readable(name)} is {readable(value)} instead of a number: the reply is malformed")


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_EXAMPLES:
        raise PayloadMismatch(f"its number of {name} is {readable(value)}: the reply is malformed")
    return value
