"""What a site may say beside its arrays: for each text its form, for each number its type and range.

Arrays are the guard's business (`befit.protocol.guard`); these are the numbers and texts beside them, which go
into logs, results and the report. Whatever is not as declared here costs the site its reply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from befit.core.errors import PayloadMismatch
from befit.core.metrics import LARGEST, Measure
from befit.core.text import readable
from befit.core.values import NO_REPLY, REFUSED, Cost, Scalar
from befit.report.numbers import is_share

Header = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`. `whole`: without a fraction; `finite`: neither infinite nor NaN; `types`: of
    JSON's."""

    least: float
    most: float
    whole: bool = False
    finite: bool = True
    types: tuple[type, ...] = (int, float)

    def check(self, value: Any, name: str) -> Any:
        """The value. Raises PayloadMismatch for any other than the declared ones."""
        number = type(value) in self.types
        if number and not self.finite and not -math.inf < value < math.inf:
            return value
        if not number or not self.least <= value <= self.most or (self.whole and value != int(value)):
            kind = "whole number" if self.whole else "number"
            raise PayloadMismatch(
                f"its {name} is {readable(value, 50)}; it has to be a {kind} from {self.least:g} to {self.most:g}"
            )
        return value


EXAMPLES = Number(0, 2**31 - 1, whole=True, types=(int,))
STEPS = Number(0, 2**31, whole=True)
SECONDS = Number(0, 366 * 86400)  # no reply takes a year
MEMORY_MIB = Number(0, 2**30)  # and no machine has a pebibyte
SHARE = Number(0, 1)
MEASURED = Number(-LARGEST, LARGEST)
REPORTED = Number(-LARGEST, LARGEST, finite=False)  # a loss may be NaN, and is logged as that
COSTS = {"seconds": SECONDS, "peak_memory_mib": MEMORY_MIB, "cpu_seconds": SECONDS}

_NAME = r".{1,200}"  # of a client; like every text here, it has letters that can be printed and no others
TEXTS = {
    "client": _NAME,
    "backbone": r"[\w./@:+-]{1,200}",
    "common_model": r"[\w./@:+-]{1,200}",
    "data": r".{0,200}",  # a benchmark of one's own says what it likes
    "version": r"[\w.+-]{1,50}",
    "error": r"[A-Za-z_]\w{0,99}",
    "name of the report": r"\w[\w./@ -]{0,99}",
    "name of a metric": r"(?=.{1,200}$)[A-Za-z][\w./@-]*( [\w./@-]+)?( of .+)?",
    "name of a number": r"\w.{0,199}",
    "text among its numbers": r".{0,200}",
}
_MOST_NAMES = {"report": 200, "metrics": 1000, "scalars": 1000}
_OURS = NO_REPLY | {REFUSED, "app"}  # kinds of failures that are the server's to tell
# The other keys of a client's row of results; a metric may not have such a name.
COLUMNS = frozenset(
    {
        "adapter",
        "baselines",
        "bytes_down",
        "bytes_scoring",
        "bytes_up",
        "confusion",
        "cpu_seconds",
        "deployed",
        "diagnostics",
        "each",
        "errors",
        "examples",
        "family",
        "gain",
        "gain_over_local",
        "held_out",
        "info",
        "majority",
        "on_others",
        "over_time",
        "reason",
        "seconds",
        "train_examples",
        "updates",
        "weights",
    }
)


def hello(header: Header) -> dict[str, Any]:
    """A site's answer to `hello`: its client, backbone, data, version, and numbers of train, val and test examples; and
    the common model, where it has one."""
    keys = ["client", "backbone", "data", "version", *(["common_model"] if "common_model" in header else [])]
    texts: dict[str, Any] = {key: _text(header.get(key), key) for key in keys}
    counts = header.get("examples")
    if not isinstance(counts, list) or len(counts) != 3:
        raise PayloadMismatch(f"its numbers of train, val and test examples are malformed: {readable(counts)}")
    return {**texts, "examples": [EXAMPLES.check(count, "number of examples") for count in counts]}


def failure(header: Header) -> tuple[str, str, str, Cost]:
    """What a site says of its own failure: kind, reason, its client where it says that, and what it took."""
    kind, reason = _text(header.get("error"), "error"), header.get("reason")
    if kind in _OURS or not isinstance(reason, str):
        raise PayloadMismatch(f"it reports a failure of the kind {kind}, with the reason {readable(reason)}: malformed")
    client = "" if header.get("client") is None else _text(header["client"], "client")
    return kind, readable(reason), client, cost(header, 0, 0) if "cost" in header else Cost()


def deployed(header: Header, labels: Collection[str]) -> str | None:
    """Which of a run's methods a site says that it deploys, of these labels; None where it has not chosen."""
    label = header.get("deployed")
    if label is not None and label not in labels:
        raise PayloadMismatch(f"it deploys {readable(label, 50)}, which is no method of the run")
    return label


def scalars(header: Header) -> dict[str, Scalar]:
    """The plain numbers of a payload, of the types that a payload may have."""
    values = _mapping(header, "scalars", "name of a number")
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                _text(item, "text among its numbers")
            elif not isinstance(item, bool):
                MEASURED.check(item, f"number {name}")
    return dict(values)


def report(header: Header) -> dict[str, float]:
    """Numbers for the log."""
    values = _mapping(header, "report", "name of the report")
    return {name: (STEPS if name == "steps" else REPORTED).check(value, name) for name, value in values.items()}


def examples(header: Header, most: int) -> int:
    """The number of examples behind a score, of which the site has `most`."""
    return Number(1, most, whole=True, types=(int,)).check(header.get("examples"), "number of examples")


def metrics(header: Header, headline: str, most: int) -> dict[str, float]:
    """A score, the headline first: finite numbers in the range of their metric, none of the name of another column of
    the results. `most` examples are behind them."""
    values = _mapping(header, "metrics", "name of a metric")
    if headline not in values:
        raise PayloadMismatch(f"its score has no {headline}; it has {readable(', '.join(values)) or 'nothing'}")
    if taken := values.keys() & COLUMNS:
        raise PayloadMismatch(f"its score has a metric {min(taken)!r}, which is no metric's name")
    checked = {name: _range(name, headline, most).check(value, name) for name, value in values.items()}
    return {headline: checked[headline], **checked}


def cost(header: Header, up: int, down: int) -> Cost:
    """Bytes as counted here; seconds, memory and processor time as the site reports them."""
    reported = header.get("cost")
    if not isinstance(reported, Mapping):
        raise PayloadMismatch(f"its cost is malformed: {readable(reported)}")
    return Cost(up, down, *(float(number.check(reported.get(key), key)) for key, number in COSTS.items()))


def _range(name: str, headline: str, most: int) -> Number:
    """Of a metric, whatever budget and examples it was measured with. `others` is the headline on others' examples."""
    measure = Measure.named(name)
    if measure.counts:
        return Number(0, most, whole=True)
    return SHARE if is_share(headline if measure.metric == "others" else measure.metric) else MEASURED


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or not re.fullmatch(TEXTS[what], value):
        raise PayloadMismatch(f"its {what} is {readable(value, 200)}, which is not a valid one")
    return value


def _mapping(header: Header, key: str, names: str) -> Mapping[str, Any]:
    value = header.get(key)
    if not isinstance(value, Mapping):
        raise PayloadMismatch(f"its {key} is malformed: {readable(value)}")
    if len(value) > _MOST_NAMES[key]:
        raise PayloadMismatch(f"its {key} has {len(value)} names, more than {_MOST_NAMES[key]}")
    for name in value:
        _text(name, names)
    return value
