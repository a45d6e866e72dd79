"""Ablations whose rows make one table: a line for each of some choices, and the same over clients as a figure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import MANY
from befit.report.numbers import NOTHING
from befit.report.table import Cell, Table, Unit, decimals, score
from befit.studies.ablations.base import Ablation, Findings, Row
from befit.studies.ablations.summary import clients_of, curve, mean_bars, number, over_seeds, seeds_of, thin_lines

Groups = Mapping[tuple[Any, ...], Sequence[Row]]  # rows by their values of the axes
Column = tuple[str, Callable[[Sequence[Row]], Cell]]  # its header, and its cell for the rows of one choice
PERCENT = Unit(lambda x: NOTHING if x is None else f"{100 * x:.1f}%", lambda x: f"{100 * (x or 0):.1f}")
ENDS = {"local": "local alone", "federated": "federated alone"}


def mean(name: str, unit: int | Unit = 3) -> Callable[[Sequence[Row]], Cell]:
    """The mean over clients, in a unit or with as many decimals."""
    return lambda rows: over_seeds(rows, name, decimals(unit) if isinstance(unit, int) else unit)


def between(low: str, high: str) -> Callable[[Sequence[Row]], Cell]:
    """From one mean over clients to another."""
    return lambda rows: Cell(_range(over_seeds(rows, low).value, over_seeds(rows, high).value))


def extremes(name: str) -> Callable[[Sequence[Row]], Cell]:
    """From the least to the largest value of a client."""
    return lambda rows: Cell(_range(min(row[name] for row in rows), max(row[name] for row in rows)))


def _range(*ends: Any) -> str | None:
    return None if None in ends else " to ".join(dict.fromkeys(f"{end:.2f}" for end in ends))


def label_of(values: Sequence[Any]) -> str:
    """
    >>> label_of((1e-05,)), label_of(("layer", True))
    ('1e-05', 'layer, on')
    """
    return ", ".join(map(_text, values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(name: str) -> tuple[float, float] | None:
    return (0, 1.02) if name == "w" else None


class Tabulated(Ablation):
    """An ablation whose rows each have a score, the values of `axes`, and perhaps the scores of both ends.

    axes     columns of a row that identify its choice
    columns  of the table, beside the choice and its score
    panels   the figure's pairs of axes beside the score's: name, title, label of the axis
    single   what a figure of single clients shows, where there are few
    """

    axes: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[Column, ...]]
    panels: ClassVar[tuple[tuple[str, str, str], ...]] = (("w", "weight", "w, the weight of the federated adapter"),)
    single: ClassVar[Literal["w", "score", ""]] = ""
    title: ClassVar[str]
    figure_title: ClassVar[str]
    note: ClassVar[str] = ""

    @abstractmethod
    def remark(self, groups: Groups) -> str:
        """A sentence on the rows apart from the scores."""

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row[axis] for axis in self.axes), []).append(row)
        scored = mean("score", score(metric))
        ends = {title: mean(name, score(metric))(rows) for name, title in ENDS.items() if name in rows[0]}
        body = [
            [*map(_text, values), *(column(group) for _, column in self.columns), scored(group)]
            for values, group in groups.items()
        ]
        body += [[title, *[None] * (len(self.axes) + len(self.columns) - 1), end] for title, end in ends.items()]
        cells = {values: scored(group) for values, group in groups.items()}
        worst, *_, best = sorted([*cells, *cells], key=lambda values: number(cells[values]))
        sentences = [
            f"Scores on test examples lie between {cells[worst]} ({label_of(worst)}) and {cells[best]} "
            f"({label_of(best)}){'; ' * bool(ends)}{' and '.join(f'{title} {end}' for title, end in ends.items())}.",
            self.remark(groups),
        ]
        headers = [*self.axes, *(title for title, _ in self.columns), metric]
        return Findings(sentences, [Table(self.title, headers, body, self.note)], self._figures(rows, groups))

    def _figures(self, rows: Sequence[Row], groups: Groups) -> list[Figure]:
        numeric = len(self.axes) == 1 and all(isinstance(values[0], (int, float)) for values in groups)
        panels = (self._curves if numeric else self._bars)(rows, groups)
        note = "Mean over clients, with one standard deviation over seeds. " + (
            "Thin: single clients. What is chosen by its score here is chosen on test examples."
            if numeric
            else "The axis of the score does not begin at zero."
        )
        figures = [Figure(self.figure_title, note, panels, columns=2, height=3.7)]
        for seed in seeds_of(rows) if self.single else ():
            clients = clients_of(rows, seed)
            if len(clients) <= MANY:
                bars = [
                    Bars(label_of(values), [row[self.single] for row in group if row["seed"] == seed], ink=ink)
                    for ink, (values, group) in enumerate(groups.items())
                ]
                scored = self.single == "score"
                panel = Panel(bars=bars, groups=clients, score=scored, fits=scored, y="" if scored else "w")
                note = "The axis does not begin at zero." if scored else ""
                figures.append(Figure(f"Every client, seed {seed}", note, [panel], height=3.0))
        return figures

    def _curves(self, rows: Sequence[Row], groups: Groups) -> list[Panel]:
        (x,) = self.axes
        ends = [name for name in ENDS if name in rows[0]]
        flat = [curve(ENDS[name], rows, x, name, ink) for ink, name in enumerate(ends, 1)]
        return [
            *(
                Panel(
                    title,
                    [*thin_lines(rows, x, name), curve("merged", rows, x, name)],
                    x=x,
                    y=y,
                    log=True,
                    limits=_limits(name),
                )
                for name, title, y in self.panels
            ),
            Panel("score", [curve("merged", rows, x, "score"), *flat], x=x, score=True, log=True),
        ]

    def _bars(self, rows: Sequence[Row], groups: Groups) -> list[Panel]:
        """One bar for each value of the first axis, side by side for those of a second one."""
        names = list(dict.fromkeys(_text(values[0]) for values in groups))
        others = list(dict.fromkeys(values[1:] for values in groups))

        def bars(name: str) -> list[Bars]:
            return [
                mean_bars(
                    " ".join(f"{axis} {_text(value)}" for axis, value in zip(self.axes[1:], other, strict=True)),
                    [group for values, group in groups.items() if values[1:] == other],
                    name,
                    ink,
                )
                for ink, other in enumerate(others)
            ]

        return [
            *(Panel(title, bars=bars(name), groups=names, y=y, limits=_limits(name)) for name, title, y in self.panels),
            Panel("score", bars=bars("score"), groups=names, score=True, fits=True),
        ]
