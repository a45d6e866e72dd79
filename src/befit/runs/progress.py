"""How far runs are: a live table in a terminal, in a notebook a line that is written over again and again; elsewhere a
plain line now and then. Fed by events only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from befit.report.numbers import bytes_text, duration_text

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from befit.runs.journal import Observer

SHOWN_FAILURES = 5


@dataclass
class RunProgress:
    """What is known of one run: where it is, and the last numbers that were reported."""

    run: str
    stages: Sequence[Mapping[str, Any]]
    clients: int
    started: float
    stage: str = ""
    round: float = 0.0  # within the stage; a fraction while clients of a round are still at work
    replied: int = 0
    failed: int = 0
    loss: float | None = None
    score: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    finished: float | None = None
    share_at_start: float = 0.0  # above zero if an earlier process did a part
    met: bool = False
    best: tuple[int, int] | None = None  # the round that counts, of how many; see `federation.patience`
    newcomers: tuple[int, int] | None = None  # how many have been measured, of how many, once all stages are over

    def update(self, event: Mapping[str, Any]) -> None:
        """Take over what an event of this run says."""
        kind = event["kind"]
        if event.get("stage", self.stage) != self.stage:
            self.stage, self.round = event["stage"], 0.0
        if kind == "client":
            before = event["round"] - event.get("span", event["round"] - int(self.round))
            if not self.met:
                self.met, self.round = True, before
                self.share_at_start = self.share_done
            # The round is complete only when the server says so.
            self.round = before + (event["round"] - before) * min(event["done"] / max(1, event["of"]), 1 - 1e-6)
        elif kind == "round":
            self.round = event["round"]
            self.replied, self.failed = event["clients"], event["failed"]
            self.loss = event.get("loss")
            self.bytes_up, self.bytes_down = event["bytes_up"], event["bytes_down"]
        elif kind == "score":
            self.score = event["mean"]
        elif kind == "best":
            self.best = event["round"], event["rounds"]
        elif kind == "newcomer":
            self.newcomers = event["done"], event["of"]

    @property
    def share_done(self) -> float:
        """Rounds that are over, as a share of the rounds of all stages."""
        if self.finished is not None:
            return 1.0
        names = [stage["name"] for stage in self.stages]
        if self.stage not in names:
            return 0.0
        index = names.index(self.stage)
        before = sum(stage["rounds"] for stage in self.stages[:index])
        return (before + self.round) / max(1, sum(stage["rounds"] for stage in self.stages))

    @property
    def rounds(self) -> int:
        """Rounds of the present stage."""
        return next((stage["rounds"] for stage in self.stages if stage["name"] == self.stage), 0)


def seconds_left(runs: Sequence[RunProgress], still_to_start: int, now: float) -> float | None:
    """Time left, if each run keeps its pace and a run without a pace yet takes the mean of the others.

    None while too little has happened to tell.
    """
    costs = [_full_cost(run, now) for run in runs]
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean * still_to_start + sum(
        (mean if cost is None else cost) * (1 - run.share_done) for run, cost in zip(runs, costs, strict=True)
    )


def _full_cost(run: RunProgress, now: float) -> float | None:
    """Seconds that the whole run takes at its pace so far; what an earlier process did does not count."""
    elapsed = (now if run.finished is None else run.finished) - run.started
    done = run.share_done - run.share_at_start
    return elapsed / done if elapsed >= 1 and done >= 0.02 else None


class Live:
    """What all progress has in common: a table with a bar below it, drawn again and again in a terminal."""

    console: Console
    quiet: bool
    clock: Callable[[], float]
    title: str
    left: Callable[[], float | None]
    _render: Callable[[], RenderableType]
    _live: Any = None
    _cell: Any = None  # a notebook's output that is written over again and again
    _began: float = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._began = self.clock()
        console = self.console
        if not self.quiet and not console.is_jupyter and console.is_terminal and not console.is_dumb_terminal:
            from rich.live import Live as RichLive

            self._live = RichLive(console=self.console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def elapsed(self) -> str:
        return f"{duration_text(self.clock() - self._began)} elapsed"

    def print_line(self, parts: Sequence[str]) -> None:
        """A line, where there is no live table; in a notebook in place of the one before."""
        if self.quiet or self._live is not None:
            return
        if not self.console.is_jupyter:
            self.console.print(" · ".join(parts), markup=False, soft_wrap=True)
            return
        from IPython.display import display  # pyright: ignore[reportMissingImports] no requirement: a notebook has it

        data = {"text/plain": " · ".join(parts)}
        if self._cell is None:
            self._cell = display(data, raw=True, display_id=True)
        else:
            self._cell.update(data, raw=True)

    def framed(self, parts: Sequence[RenderableType], share: float, done: str, *lost: tuple[str, str]) -> Group:
        """Title, parts, and a bar: the share that is over, the same in words, and what was lost, with its colour."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self.left()
        foot = Table.grid(padding=(0, 2, 0, 0))
        foot.add_row(
            ProgressBar(total=1.0, completed=share, width=30),
            Text(done),
            Text(self.elapsed),
            Text("" if left is None or share >= 1 else f"{duration_text(left)} left"),
            *(Text(what, style=colour) for what, colour in lost),
        )
        return Group(Text(self.title, style="bold"), *parts, Text(""), foot)


def bare_table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


@dataclass
class Progress(Live):
    """An observer of runs, to be used as a context.

    console  where to show; nothing is shown if `quiet`
    planned  names of the runs that will come, for the time left. An event of kind "planned" names others, which are
             shown in place of those before, and can bring a title
    every_s  seconds between two lines where the console is not a terminal; half a second in a notebook
    """

    console: Console
    planned: Sequence[str] = ()
    title: str = ""
    quiet: bool = False
    every_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    runs: dict[str, RunProgress] = field(default_factory=dict[str, RunProgress])
    metric: str = "accuracy"
    failures: int = 0
    unscored: int = 0
    _last_line: float = float("-inf")

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind, now = event["kind"], self.clock()
        if kind == "planned":
            self.planned, self.runs = event["runs"], {}
            if "title" in event:
                self.title = event["title"]
                self.print_line([self.title])
            return
        self.metric = event.get("metric", self.metric)
        if kind == "run_started":
            sums = event.get("bytes_up", 0), event.get("bytes_down", 0)
            self.runs[event["run"]] = RunProgress(
                event["run"], event["stages"], event["clients"], now, bytes_up=sums[0], bytes_down=sums[1]
            )
            return
        run = self.runs[event["run"]]
        run.update(event)
        if kind == "failure":
            self._tell_failure(event)
        elif kind == "fleet" and not self.quiet:
            size = "one by one" if event["size"] == 1 else f"up to {event['size']} at once"
            text = f"{event['run']} {event['stage']}: clients train {size} from now on: {event['reason']}"
            self.console.print(text, markup=False, soft_wrap=True)
        elif kind == "run_finished":
            run.finished = now
            run.score = event.get("mean", run.score)
        self._tell(run, now, final=kind == "run_finished")

    @property
    def waiting(self) -> list[str]:
        """Planned runs that are still to start. One planned before a started one was finished by an earlier process."""
        started = [index for index, name in enumerate(self.planned) if name in self.runs]
        return [*self.planned[started[-1] + 1 if started else 0 :]]

    def left(self) -> float | None:
        """Seconds left, over all planned runs."""
        return seconds_left(list(self.runs.values()), len(self.waiting), self.clock())

    def line(self, run: RunProgress) -> str:
        """One run's progress in a line."""
        return " · ".join(self._parts(run))

    def _parts(self, run: RunProgress) -> list[str]:
        if run.finished is not None and not run.stage:
            return [run.run, "done, by an earlier process", *([] if run.score is None else [f"{run.score:.3f}"])]
        parts = [f"{run.run} {run.stage} {int(run.round)}/{run.rounds}", f"clients {_clients(run)}"]
        if run.loss is not None:
            parts.append(f"loss {run.loss:.3f}")
        if run.score is not None:
            parts.append(f"{self.metric} {run.score:.3f}")
        parts.append(f"up {bytes_text(run.bytes_up)}, down {bytes_text(run.bytes_down)}")
        if run.best is not None:
            parts.append(f"best round {run.best[0]} of {run.best[1]}")
        if run.newcomers is not None:
            parts.append(f"newcomers {run.newcomers[0]}/{run.newcomers[1]}")
        parts.append(self.elapsed)
        if run.finished is not None:
            parts.append("done")
        elif (left := self.left()) is not None:
            parts.append(f"{duration_text(left)} left")
        return parts

    def _tell(self, run: RunProgress, now: float, final: bool) -> None:
        if final or now - self._last_line >= (0.5 if self.console.is_jupyter else self.every_s):
            self._last_line = now
            self.print_line(self._parts(run))

    def _tell_failure(self, event: Mapping[str, Any]) -> None:
        if event["scoring"]:
            self.unscored += 1
        else:
            self.failures += 1
        told = self.failures + self.unscored
        if self.quiet or told > SHOWN_FAILURES + 1:
            return
        what = "no score of" if event["scoring"] else "left out"
        text = f"{event['run']} {event['stage']} round {event['round']}: {what} {event['client']}: {event['reason']}"
        if told > SHOWN_FAILURES:
            text = "further failures are counted here and listed in the report"
        self.console.print(text, style="yellow", markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.text import Text

        names = ("run", "stage", "round", "clients", "loss", self.metric, "up", "down")
        rows = [
            [
                Text(run.run, style="bold"),
                Text("done", style="green") if run.finished is not None else Text(_stage(run)),
                Text(f"{int(run.round)}/{run.rounds}" if run.stage else ""),
                Text(_clients(run)),
                Text("" if run.loss is None else f"{run.loss:.3f}"),
                Text("" if run.score is None else f"{run.score:.3f}"),
                Text(bytes_text(run.bytes_up)),
                Text(bytes_text(run.bytes_down)),
            ]
            for run in self.runs.values()
        ]
        rows += [[Text(name, style="dim"), Text("waiting", style="dim"), *[Text()] * 6] for name in self.waiting]
        least = [8 if name in ("up", "down") else 5 for name in names]
        widths = [max([least[at], len(name), *(row[at].cell_len for row in rows)]) for at, name in enumerate(names)]
        shown = _fitting(widths, self.console.width)
        table = bare_table()
        for at in shown:
            justify, overflow = ("left", "ellipsis") if at < 2 else ("right", "fold")
            table.add_column(names[at], justify=justify, no_wrap=True, min_width=least[at], overflow=overflow)
        for row in rows:
            table.add_row(*(row[at] for at in shown))
        share = sum(run.share_done for run in self.runs.values()) / max(1, len(self.runs) + len(self.waiting))
        return self.framed(
            [table],
            share,
            f"{share:.0%}",
            (f"{self.failures} left out" * bool(self.failures), "yellow"),
            (f"{self.unscored} scores missing" * bool(self.unscored), "yellow"),
        )


@contextmanager
def watched(observer: Observer | None, quiet: bool, make: Callable[[Console], Live]) -> Iterator[Observer | None]:
    """The observer that is given; without one what `make` makes, where a person watches: in a terminal or notebook."""
    from befit.report.screen import Screen

    console = Screen(stderr=True, highlight=False)
    if observer is not None or quiet or not (console.is_terminal or console.is_jupyter):
        yield observer
        return
    with make(console) as progress:
        yield progress


def _fitting(widths: Sequence[int], room: int) -> list[int]:
    """The columns of the live table that have room whole: a line more would spoil it, and a number cut would mislead.

    >>> _fitting([8, 8, 5, 7, 5, 8, 8, 8], 80), _fitting([8, 8, 5, 7, 5, 8, 8, 8], 50)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5])
    """
    shown = list(range(len(widths)))
    for least_needed in (3, 7, 6, 1, 4):
        if sum(widths[at] + 2 for at in shown) > room:
            shown.remove(least_needed)
    return shown


def _stage(run: RunProgress) -> str:
    if run.newcomers is not None:
        return f"newcomers {run.newcomers[0]}/{run.newcomers[1]}"
    return run.stage or "starting"


def _clients(run: RunProgress) -> str:
    return f"{run.replied}/{run.replied + run.failed}" if run.replied or run.failed else str(run.clients)
