"""How far a comparison is: its cells, side by side, as `befit.runs.progress` shows runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from befit.report.numbers import duration_text
from befit.runs.progress import Live, RunProgress, bare_table, seconds_left

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from befit.studies.compare.plan import Plan

AROUND = 6  # lines of the terminal that are not runs of a comparison


@dataclass
class CompareProgress(Live):
    """An observer of a comparison, to be used as a context."""

    console: Console
    plan: Plan
    jobs: int = 1
    quiet: bool = False
    clock: Callable[[], float] = time.monotonic
    running: dict[int, RunProgress] = field(default_factory=dict[int, RunProgress])
    means: dict[int, float | None] = field(default_factory=dict[int, float | None])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    spared: set[int] = field(default_factory=set[int])
    left_out: int = 0
    _took: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self._cells, self.title = self.plan.cells, self.plan.head.title

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind, cell, now = event["kind"], event["cell"], self.clock()
        if kind == "cell_started":
            self.running[cell] = RunProgress("", [], 0, now)
            self.spared.discard(cell)
        elif kind == "run_started":
            began = self.running[cell].started
            self.running[cell] = RunProgress("", event["stages"], event["clients"], began)
        elif kind == "failure":
            self.left_out += not event["scoring"]
        elif kind in ("round", "client", "score"):
            self.running[cell].update(event)
        elif kind == "cell_finished":
            self.means[cell] = event["mean"]
            self.running.pop(cell, None)
            if not event["reused"]:
                self._took.append(event["seconds"])
            self._tell(cell, "done before" if event["reused"] else f"done in {duration_text(event['seconds'])}")
        elif kind == "cell_spared":
            self.spared.add(cell)
        elif kind == "cell_failed":
            self.failed[cell] = event["error"]
            self.running.pop(cell, None)
            self._tell(cell, f"failed: {event['error']}")

    def left(self) -> float | None:
        """Seconds left, if cells that are still to start take as long as the others and all jobs stay busy."""
        now = self.clock()
        paces = {cell: seconds_left([run], 0, now) for cell, run in self.running.items()}
        if not self._took and all(left is None for left in paces.values()):
            return None
        full = [*self._took, *(now - self.running[cell].started + left for cell, left in paces.items() if left)]
        mean = sum(full) / max(1, len(full))
        waiting = len(self._cells) - self.over - len(self.running)
        rest = sum(mean * (1 - self.running[cell].share_done) if left is None else left for cell, left in paces.items())
        return (mean * waiting + rest) / max(1, min(self.jobs, len(self.running) + waiting))

    @property
    def over(self) -> int:
        return len(self.means) + len(self.failed) + len(self.spared)

    def _tell(self, cell: int, what: str) -> None:
        planned, mean = self._cells[cell], self.means.get(cell)
        parts = [f"{self.over}/{len(self._cells)}", f"{planned.label}, seed {planned.seed}", what]
        if mean is not None:
            parts.append(f"mean {mean:.3f}")
        if (left := self.left()) is not None and self.over < len(self._cells):
            parts.append(f"{duration_text(left)} left")
        self.print_line(parts)

    def _render(self) -> RenderableType:
        from rich.text import Text

        table = bare_table()
        shown, hidden = self._shown(max(3, self.console.size.height - AROUND))
        rows = [self._row(label) for label in shown]
        numbers = [max(5, len(self.plan.seeds)), *(max([5, *(len(str(row[at])) for row in rows)]) for at in (2, 3))]
        room = self.console.width - sum(numbers) - 2 * 5  # the numbers are whole; names and what is done now give way
        longest = max(len(str(row[0])) for row in rows)
        name = max(3, min(longest, 44, room - 12))
        table.add_column("run", no_wrap=True, overflow="ellipsis", width=name)
        table.add_column("seeds", no_wrap=True, width=numbers[0])
        table.add_column("mean", justify="right", no_wrap=True, width=numbers[1])
        table.add_column("± SD", justify="right", no_wrap=True, width=numbers[2])
        table.add_column("now", no_wrap=True, overflow="ellipsis", width=max(3, room - name))
        for row in rows:
            table.add_row(*row)
        more = [Text(f"and {hidden} more, done or waiting", style="dim")] if hidden else []
        over = self.over + sum(run.share_done for run in self.running.values())
        return self.framed(
            [table, *more],
            over / max(1, len(self._cells)),
            f"{self.over} of {len(self._cells)}",
            (f"{len(self.failed)} failed" * bool(self.failed), "red"),
            (f"{self.left_out} replies left out" * bool(self.left_out), "yellow"),
        )

    def _shown(self, room: int) -> tuple[list[str], int]:
        """Labels in the plan's order: all, or as many as there is room for around those that are running."""
        labels = [run.label for run in self.plan.runs]
        if len(labels) <= room:
            return labels, 0
        active = {self._cells[cell].label for cell in self.running}
        middle = min((labels.index(label) for label in active), default=0)
        start = max(0, min(middle - room // 3, len(labels) - room))
        return labels[start : start + room], len(labels) - room

    def _row(self, label: str) -> tuple[Any, ...]:
        from rich.text import Text

        cells = [index for index, cell in enumerate(self._cells) if cell.label == label]
        marks = Text()
        for cell in cells:
            if cell in self.means:
                marks.append("●", "green")
            elif cell in self.failed:
                marks.append("✗", "red")
            elif cell in self.running:
                marks.append("◐", "cyan")
            elif cell in self.spared:
                marks.append("-", "dim")
            else:
                marks.append("·", "dim")
        means = [mean for cell in cells if (mean := self.means.get(cell)) is not None]
        now = [f"seed {self._cells[cell].seed}: {_where(self.running[cell])}" for cell in cells if cell in self.running]
        now += [f"seed {self._cells[cell].seed} failed: {self.failed[cell]}" for cell in cells if cell in self.failed]
        return (
            Text(label, style="bold" if now else ""),
            marks,
            f"{statistics.fmean(means):.3f}" if means else "",
            f"{statistics.stdev(means):.3f}" if len(means) > 1 else "",
            Text("; ".join(now)),
        )


def _where(run: RunProgress) -> str:
    return f"{run.stage} {int(run.round)}/{run.rounds}" if run.stage else "starting"
