"""What a comparison shows while it runs, against a clock that the test moves."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from befit.studies.compare.comparison import make_plan
from befit.studies.compare.progress import CompareProgress

STUDY: dict[str, Any] = {
    "study": {"title": "Two by two"},
    "base": {"benchmark": "digits"},
    "seeds": [0, 1],
    "runs": {"Alone": "local", "Fed [red]IT": "fedit"},
}
STAGES = [{"name": "federate", "rounds": 10}]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, jobs: int = 1, study: dict[str, Any] = STUDY, height: int = 25) -> CompareProgress:
    console = Console(file=io.StringIO(), width=100, height=height, _environ={})
    progress = CompareProgress(console, make_plan(study), jobs=jobs, clock=clock)
    progress.__enter__()
    return progress


def finish(progress: CompareProgress, cell: int, seconds: float, mean: float = 0.5, reused: bool = False) -> None:
    event = {"kind": "cell_finished", "cell": cell, "mean": mean, "reused": reused, "seconds": seconds}
    progress({"kind": "cell_started", "cell": cell} if not reused else event)
    if not reused:
        progress(event)


def shown(progress: CompareProgress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, height=progress.console.height)
    progress.console, before = console, progress.console
    console.print(progress._render())
    progress.console = before
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(progress: CompareProgress) -> list[str]:
    assert isinstance(progress.console.file, io.StringIO)
    return progress.console.file.getvalue().splitlines()


def test_each_cell_is_a_line_where_there_is_no_terminal(clock: Clock) -> None:
    progress = watch(clock)
    finish(progress, 0, 10.0, mean=0.25)
    progress({"kind": "cell_started", "cell": 1})
    progress({"kind": "cell_failed", "cell": 1, "error": "RunError: no"})
    finish(progress, 2, 0.0, reused=True)
    assert lines(progress) == [
        "1/4 · Alone, seed 0 · done in 0:10 · mean 0.250 · 0:30 left",
        "2/4 · Fed [red]IT, seed 0 · failed: RunError: no · 0:20 left",
        "3/4 · Alone, seed 1 · done before · mean 0.500 · 0:10 left",
    ]


def test_time_left_is_shared_by_the_jobs_and_what_was_done_before_takes_none(clock: Clock) -> None:
    progress = watch(clock, jobs=2)
    finish(progress, 0, 0.0, reused=True)
    assert progress.left() is None
    finish(progress, 1, 8.0)
    assert progress.left() == pytest.approx(8.0)  # two more of 8 s, side by side
    progress({"kind": "cell_started", "cell": 2})
    progress({"kind": "run_started", "cell": 2, "stages": STAGES, "clients": 3})
    clock.now = 4.0
    progress(
        {
            "kind": "round",
            "cell": 2,
            "stage": "federate",
            "round": 5,
            "rounds": 10,
            "clients": 3,
            "failed": 0,
            "loss": 1.0,
            "bytes_up": 0,
            "bytes_down": 0,
        }
    )
    assert progress.left() == pytest.approx((4.0 + 8.0) / 2)


def test_the_live_table_has_a_mark_for_every_seed_and_what_runs_now(clock: Clock) -> None:
    progress = watch(clock)
    finish(progress, 0, 10.0, mean=0.2)
    finish(progress, 2, 10.0, mean=0.4)
    progress({"kind": "cell_started", "cell": 1})
    progress({"kind": "run_started", "cell": 1, "stages": STAGES, "clients": 3})
    progress({"kind": "client", "cell": 1, "stage": "federate", "round": 4, "span": 1, "done": 1, "of": 3})
    text = shown(progress)
    alone = next(line for line in text.splitlines() if line.startswith("Alone"))
    assert alone.split() == ["Alone", "●●", "0.300", "0.141"]
    assert "seed 0: federate 3/10" in text and "◐·" in text and "Fed [red]IT" in text
    assert "2 of 4" in text and "Two by two" in text
    progress({"kind": "cell_failed", "cell": 1, "error": "RunError: no"})
    progress({"kind": "failure", "cell": 2, "client": "c", "scoring": False})
    progress({"kind": "failure", "cell": 2, "client": "c", "scoring": True})
    text = shown(progress)
    assert (
        "✗·" in text and "seed 0 failed: RunError: no" in text and "1 failed" in text and "1 replies left out" in text
    )


def test_a_long_list_shows_what_runs_now(clock: Clock) -> None:
    runs = {f"Run {index}": {"method": "fedit", "set": {"train.max_steps": index + 1}} for index in range(30)}
    progress = watch(clock, study={**STUDY, "runs": runs}, height=16)
    progress({"kind": "cell_started", "cell": 20})
    text = shown(progress)
    assert "Run 20" in text and "Run 2 " not in text and "and 20 more, done or waiting" in text


def test_quiet_shows_nothing(clock: Clock) -> None:
    progress = watch(clock)
    progress.quiet = True
    finish(progress, 0, 10.0)
    assert lines(progress) == []


def test_a_narrow_terminal_cuts_no_mean(clock: Clock) -> None:
    study = {**STUDY, "runs": {f"a run with a long name {name}": value for name, value in STUDY["runs"].items()}}
    progress = watch(clock, study=study)
    finish(progress, 0, 10.0, mean=0.25)
    finish(progress, 2, 10.0, mean=0.75)
    for width in (45, 60):
        text = shown(progress, width)
        assert "0.500" in text and "0.354" in text and max(map(len, text.splitlines())) <= width
