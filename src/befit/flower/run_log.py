"""What `flwr run --stream` shows of a run: a line for all that happens, a table at the end, an error in a line."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from befit.core.errors import BefitError
from befit.report.numbers import bytes_text, count_text, score_text
from befit.report.results import RunResults, failures_of
from befit.report.table import Table
from befit.report.tables import client_table

_LOG = logging.getLogger(__name__)


class RunLog:
    """An observer that logs a line for each round, score and run. Failures are logged where they are noted."""

    def __init__(self) -> None:
        self._without: list[str] = []  # clients of this round
        self._unscored: list[str] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind, run = event["kind"], event["run"]
        if kind == "run_started":
            self._without, self._unscored = [], []
        elif kind == "failure":
            (self._unscored if event["scoring"] else self._without).append(event["client"])
        elif kind == "round":
            _LOG.info("%s", self._round(event))
            self._without, self._unscored = [], []  # where nobody told a score, no other event ends the list of those
        elif kind == "score":
            text = f"{event['metric']} {score_text(event['mean'], event['metric'])}{_lacking(self._unscored)}"
            self._unscored = []
            _LOG.info("%s, %s round %d: mean %s", run, event["stage"], event["round"], text)
        elif kind == "best":
            _LOG.info("%s, %s: best round %d of %d", run, event["stage"], event["round"], event["rounds"])
        elif kind == "run_finished":
            _LOG.info("%s is finished", run)

    def _round(self, event: Mapping[str, Any]) -> str:
        came = event["clients"]
        parts = [
            f"{event['run']}, {event['stage']} round {event['round']} of {event['rounds']}: "
            f"{came} of {came + event['failed']} clients replied{_lacking(self._without)}"
        ]
        if event["left_out"]:
            parts.append(f"{', '.join(event['left_out'])} left out by guard.rule")
        if event["loss"] is not None:
            parts.append(f"loss {event['loss']:.3f}")
        return ", ".join(
            [*parts, f"up {bytes_text(event['bytes_up'])} and down {bytes_text(event['bytes_down'])} so far"]
        )


def _lacking(clients: Sequence[str]) -> str:
    return f", without {', '.join(clients)}" if clients else ""


def tell_results(path: Path, results: RunResults) -> None:
    """The clients' scores, and where the rest is."""
    _LOG.info("%s", lined_up(client_table(results)))
    lost, unscored = (len(failures_of(results, scoring)) for scoring in (False, True))
    if lost:
        _LOG.info("%s left out; the report says which and why", f"{lost} replies were" if lost > 1 else "1 reply was")
    if unscored:
        _LOG.info("%s missing; the report says which and why", count_text(unscored, "score"))
    _LOG.info("the run is finished: %s", path)


def lined_up(table: Table) -> str:
    """A table as plain lines.

    >>> print(lined_up(Table("Scores", ["client", "accuracy"], [["a", "9 %"], ["bc", "10 %"]])))
    Scores
    client  accuracy
    a            9 %
    bc          10 %
    """
    rows = [table.titles, *table.texts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [table.is_numeric(at) for at in range(len(widths))]
    lines = (
        "  ".join(
            f"{text:>{width}}" if to else f"{text:<{width}}" for text, width, to in zip(row, widths, right, strict=True)
        )
        for row in rows
    )
    return "\n".join([table.title, *(line.rstrip() for line in lines)])


class Ended(RuntimeError):
    """A run that has ended with an error, which has been told already."""


@contextmanager
def told_in_a_line(out: Path) -> Iterator[None]:
    """Say in a line why a run has ended, and leave the traceback in a file beside its results."""
    logging.getLogger("flwr").addFilter(_without_traceback)
    try:
        yield
    except Exception as error:
        place = out / ".traceback.txt"
        text = str(error) if isinstance(error, BefitError) else f"{type(error).__name__}: {error}"
        text = text.replace("with --resume", "with --run-config resume=true")  # as it is called here
        try:
            out.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:
            _LOG.exception("the traceback cannot be written to %s", place)
        _LOG.error("the run has ended: %s (%s)", " ".join(text.split()), place)
        raise Ended(" ".join(text.split())) from None


def _without_traceback(record: logging.LogRecord) -> bool:
    """Flower logs whatever an app raises with its traceback."""
    if record.exc_info and isinstance(record.exc_info[1], Ended):
        record.exc_info, record.exc_text = None, None
    return True
