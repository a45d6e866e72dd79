"""Follows the journal of a run: reads what metrics.jsonl gained, and gives trackers the numbers of each round."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from befit.core.metrics import Measure
from befit.core.names import method_folder
from befit.runs.trackers.base import Tracker, check_trackers, make_tracker

_LOG = logging.getLogger(__name__)

NAMED = 50  # beyond so many clients only their mean and the worst are sent
Observer = Callable[[dict[str, Any]], None]


def round_values(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of one round, from its lines.

    STAGE/train/loss and STAGE/diagnostic/NAME are means over clients; STAGE/SPLIT/METRIC is their mean, …/worst the
    least of them, and STAGE/clients/CLIENT/METRIC each one's where there are at most 50; STAGE/failures is a count,
    and so is STAGE/unscored, of scores that are missing.
    """
    grouped: dict[str, list[float]] = {}
    values: dict[str, float] = {}
    clients: dict[str, float] = {}
    scored: set[str] = set()
    for line in lines:
        stage, kind = line["stage"], line["kind"]
        if kind == "failure":
            name = f"{stage}/{'unscored' if line.get('scoring') else 'failures'}"
            values[name] = values.get(name, 0.0) + 1
            continue
        value = line["loss"] if kind == "train" else line.get("value")  # a row of values is not followed
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            continue  # null where a number was not finite; the journal has it
        if kind == "train":
            grouped.setdefault(f"{stage}/train/loss", []).append(value)
        elif kind == "diagnostic":
            grouped.setdefault(f"{stage}/diagnostic/{line['name']}", []).append(value)
        elif kind == "score" and not Measure.named(line["metric"]).counts:
            name = f"{stage}/{line['split']}/{line['metric']}"
            grouped.setdefault(name, []).append(value)
            scored.add(name)
            clients[f"{stage}/clients/{line['client']}/{line['metric']}"] = value
    for name, numbers in grouped.items():
        values[name] = fmean(numbers)
        if name in scored:
            values[f"{name}/worst"] = min(numbers)
    if len({name.split("/")[2] for name in clients}) <= NAMED:
        values |= clients
    return values


class Follower:
    """Sends a run's rounds to its trackers, each when the next one begins, the last at the end.

    A tracker that fails is told once and left out from then on: training does not stop for it.
    """

    def __init__(self, path: Path, trackers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._path, self._trackers = path, dict[str, Tracker]()
        self._read = 0
        self._lines: list[dict[str, Any]] = []
        for name, opened in trackers.items():
            try:
                self._trackers[name] = opened()
            except Exception as error:
                _left_out(name, error)

    def poll(self) -> None:
        """Read the complete lines that are new."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read += end
        for text in data[:end].splitlines():
            line = json.loads(text)
            if self._lines and key_of(line) != key_of(self._lines[0]):
                self._send()
            self._lines.append(line)

    def close(self) -> None:
        """Send the last round and close the trackers."""
        self.poll()
        self._send()
        self._each(lambda tracker: tracker.close())

    def _send(self) -> None:
        if self._lines and (values := round_values(self._lines)):
            step = int(self._lines[0]["round"])
            self._each(lambda tracker: tracker.log(step, values))
        self._lines = []

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # a service that is down, a full disk of its own: not the run's concern
                del self._trackers[name]
                _left_out(name, error)


def _left_out(name: str, error: Exception) -> None:
    text = "%s takes no more numbers of this run: %s: %s; metrics.jsonl has them all"
    _LOG.warning(text, name, type(error).__name__, error)


def key_of(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["stage"], line["round"]


@contextmanager
def tracked(
    names: Sequence[str], path: Path, main: str, config: Mapping[str, Any], observer: Observer | None
) -> Iterator[Observer | None]:
    """An observer that feeds trackers and then calls `observer`; `observer` itself where there are none.

    names   trackers, such as tensorboard
    path    the run directory
    main    the run whose files are in it; all others are baselines, in baselines/
    config  the resolved configuration, with the experiment's name

    Raises ConfigError for a library that is not installed.
    """
    if not names:
        yield observer
        return
    check_trackers(names)
    followers: dict[str, Follower] = {}

    def observe(event: dict[str, Any]) -> None:
        run = event["run"]
        if event["kind"] == "run_started":
            folder = method_folder(path, run, main)
            trackers = {name: partial(make_tracker, name, run, config["name"], config, path) for name in names}
            followers[run] = Follower(folder / "metrics.jsonl", trackers)
        elif run in followers:
            if event["kind"] == "run_finished":
                followers.pop(run).close()
            else:
                followers[run].poll()
        if observer is not None:
            observer(event)

    try:
        yield observe
    finally:
        for follower in followers.values():  # of a run that was interrupted
            follower.close()
