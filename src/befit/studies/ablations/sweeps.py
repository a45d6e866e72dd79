"""Ablations that are a grid of a method's options: one run for each choice, all behind the same two branches."""

from __future__ import annotations

import itertools
import statistics
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from befit.methods.potara import Granularity
from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import MANY
from befit.report.table import Cell, Table, Unit, decimals, score
from befit.studies.ablations.base import Ablation, Findings, Row
from befit.studies.ablations.registry import register
from befit.studies.ablations.seed import FEDERATED, LOCAL, Seed, changed, end_of
from befit.studies.ablations.summary import clients_of, curve, mean_bars, seeds_of, spread, thin_lines

Groups = Mapping[tuple[Any, ...], Sequence[Row]]
PERCENT = Unit(lambda value: "–" if value is None else f"{100 * value:.1f}%", lambda value: f"{100 * (value or 0):.1f}")
THREE = decimals(3)
_FLAG = {True: "on", False: "off"}


@dataclass(frozen=True)
class Column:
    """A reported number in the table, as mean over clients or from the least to the largest mean of two of them."""

    title: str
    names: tuple[str, ...]
    unit: Unit = THREE

    def cell(self, rows: Sequence[Row]) -> Cell:
        found = [spread(rows, name) for name in self.names]
        if any(one is None for one in found):
            return Cell(None)
        if len(found) == 1 and found[0]:
            return Cell(found[0].mean, self.unit, found[0].deviation)
        return Cell(" to ".join(dict.fromkeys(self.unit.value(one.mean) for one in found if one)))


class Sweep(Ablation):
    """A grid of options.

    axes     columns of a row that say which run it is of
    columns  what the table says of each run, beside its score
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
    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Every run: its values of `axes`, and the options that it changes."""

    @abstractmethod
    def numbers(self, reported: Mapping[str, float]) -> Row:
        """What a row says of a client, of what the client reported of its merge."""

    @abstractmethod
    def remark(self, groups: Groups) -> str:
        """What the rows say beside the scores, in a sentence."""

    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        # What a guard keeps is not the merge that is asked about.
        return {label_of(values): {**changes, "guard": "none"} for values, changes in self.grid()}

    def rows(self, seed: Seed) -> Iterator[Row]:
        block = seed.experiment.method
        ends = {
            "federated": seed.scores(seed.federated()),
            "local": seed.scores(seed.run(LOCAL, end_of(block, 0.0))),
        }
        runs = [seed.run(label, changed(block, changes)) for label, changes in self.variants().items()]
        measured = [(seed.scores(run), seed.reported(run)) for run in runs]
        for client in ends["local"]:
            for (values, _), (scores, reported) in zip(self.grid(), measured, strict=True):
                yield {
                    "client": client,
                    **dict(zip(self.axes, values, strict=True)),
                    **self.numbers(reported[client]),
                    "score": scores[client],
                    **{name: end[client] for name, end in ends.items()},
                }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row[axis] for axis in self.axes), []).append(row)
        in_metric = Column(metric, ("score",), score(metric))
        body = [
            [*map(_text, values), *(column.cell(mine) for column in self.columns), in_metric.cell(mine)]
            for values, mine in groups.items()
        ]
        ends = {title: Column("", (name,), score(metric)) for title, name in _ENDS.items()}
        blank = [None] * (len(self.axes) + len(self.columns) - 1)
        body += [[title, *blank, column.cell(rows)] for title, column in ends.items()]
        headers = [*self.axes, *(column.title for column in self.columns), metric]
        means = {values: found.mean for values, mine in groups.items() if (found := spread(mine, "score"))}
        best, worst = max(means, key=lambda values: means[values]), min(means, key=lambda values: means[values])
        told = {values: in_metric.cell(groups[values]) for values in (best, worst)}
        alone = " and ".join(f"{title} {column.cell(rows)}" for title, column in ends.items())
        sentences = [
            f"Scores on test examples lie between {told[worst]} ({label_of(worst)}) and {told[best]} "
            f"({label_of(best)}); {alone}.",
            self.remark(groups),
        ]
        return Findings(sentences, [Table(self.title, headers, body, self.note)], self._figures(rows, groups))

    def _figures(self, rows: Sequence[Row], groups: Groups) -> list[Figure]:
        numeric = len(self.axes) == 1 and all(isinstance(values[0], float) for values in groups)
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
                    Bars(label_of(values), [row[self.single] for row in mine if row["seed"] == seed], ink=ink)
                    for ink, (values, mine) in enumerate(groups.items())
                ]
                scored = self.single == "score"
                panel = Panel(bars=bars, groups=clients, score=scored, fits=scored, y="" if scored else "w")
                note = "The axis does not begin at zero." if scored else ""
                figures.append(Figure(f"Every client, seed {seed}", note, [panel], height=3.0))
        return figures

    def _curves(self, rows: Sequence[Row], groups: Groups) -> list[Panel]:
        (x,) = self.axes
        flat = [curve(title, rows, x, name, ink) for ink, (title, name) in enumerate(_ENDS.items(), 1)]
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
                    [mine for values, mine in groups.items() if values[1:] == other],
                    name,
                    ink,
                )
                for ink, other in enumerate(others)
            ]

        return [
            *(Panel(title, bars=bars(name), groups=names, y=y, limits=_limits(name)) for name, title, y in self.panels),
            Panel("score", bars=bars("score"), groups=names, score=True, fits=True),
        ]


_ENDS = {LOCAL: "local", FEDERATED: "federated"}


def label_of(values: Sequence[Any]) -> str:
    """
    >>> label_of((1e-05,)), label_of(("layer", True))
    ('1e-05', 'layer, on')
    """
    return ", ".join(map(_text, values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _FLAG[value]
    return f"{value:.0e}" if isinstance(value, float) else str(value)


def _limits(name: str) -> tuple[float, float] | None:
    return (0, 1.02) if name == "w" else None


def _mean(rows: Sequence[Row], name: str, digits: int = 3) -> str:
    return str(Column("", (name,), decimals(digits)).cell(rows))


@register("potara-damping", title="Damping", method="potara")
@dataclass(frozen=True)
class DampingSweep(Sweep):
    """How weight and score hang on the damping of 1/F.

    deltas  sizes of the damping, of the configured kind

    The statistics stay, only `delta` changes. Damping is ours (docs/methods/potara.md): it shrinks the weight towards
    one half, and too little of it lets a few coordinates decide.
    """

    deltas: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

    axes: ClassVar = ("delta",)
    columns: ClassVar = (Column("mean w", ("w",)), Column("damped", ("damped_share",), PERCENT))
    title: ClassVar = "Every size of the damping"
    figure_title: ClassVar = "Weight and score over the damping"
    note: ClassVar = "Damped: entries of the statistics with less Fisher information than the damping adds."

    def __post_init__(self) -> None:
        if not self.deltas or not min(self.deltas) > 0:
            raise ValueError(f"deltas: must be positive numbers, got {list(self.deltas)}")

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [((delta,), {"delta": delta}) for delta in dict.fromkeys(map(float, self.deltas))]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {name: reported[name] for name in ("w", "damped_share")}

    def remark(self, groups: Groups) -> str:
        first, last = min(groups), max(groups)
        return (
            f"From delta {label_of(first)} to {label_of(last)} the mean weight goes from {_mean(groups[first], 'w')} "
            f"to {_mean(groups[last], 'w')}."
        )


@register("potara-granularity", title="Granularity and correlation", method="potara")
@dataclass(frozen=True)
class GranularitySweep(Sweep):
    """One weight, or many, to the single coordinate.

    granularities  those to compare, from coarse to fine

    Each with and without the correlation. The paper has one weight per client; refining a partition can only lower the
    total trace. Whether it raises the score is the question. Traces are shares of the better parent's, `min(a, b)`, at
    each client. Without correlation, coordinates are Fisher merging.
    """

    granularities: tuple[Granularity, ...] = get_args(Granularity)

    axes: ClassVar = ("granularity", "correlation")
    columns: ClassVar = (
        Column("total trace", ("trace",)),
        Column("weights, mean range", ("w_min", "w_max"), decimals(2)),
    )
    panels: ClassVar = (("trace", "total optimal trace", "share of the better parent's"),)
    title: ClassVar = "Every granularity"
    figure_title: ClassVar = "Total optimal trace and score by granularity"
    note: ClassVar = (
        "Traces with the correlation on and off come from different estimates of the same errors: compare them only "
        "within one setting. A lower trace is a tighter bound."
    )

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [
            ((granularity, correlation), {"granularity": granularity, "correlation": correlation})
            for correlation in (True, False)
            for granularity in dict.fromkeys(self.granularities)
        ]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        total = reported.get("trace_merged_groups", reported["trace_merged"])
        least = min(reported["trace_fed"], reported["trace_local"])
        return {
            "w": reported["w"],
            **{name: reported.get(name, reported["w"]) for name in ("w_min", "w_max")},
            "trace": total / least if least > 0 else None,
        }

    def remark(self, groups: Groups) -> str:
        with_correlation = [values for values in groups if values[1]]
        words = [
            f"{values[0]} weights reach {_mean(groups[values], 'trace')} of the better parent's trace"
            for values in (with_correlation[0], with_correlation[-1])
        ]
        return f"With correlation, {'; '.join(dict.fromkeys(words))}."


@register("potara-merge-space", title="Merge space", method="potara")
@dataclass(frozen=True)
class MergeSpace(Sweep):
    """Merge A and B, their product, or that cut to the rank.

    With the same weights. The paper merges factors (appendix B): `B_m A_m = w B_f A_f + (1-w) B_l A_l - w (1-w) (B_f -
    B_l)(A_f - A_l)`. The product gap is the size of the last term over that of the first two, for one weight for each
    client.
    """

    axes: ClassVar = ("space",)
    columns: ClassVar = (Column("mean w", ("w",), decimals(2)), Column("product gap", ("product_gap",)))
    panels: ClassVar = ()
    single: ClassVar = "score"
    title: ClassVar = "Every space"
    figure_title: ClassVar = "Score by merge space"

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [((space,), {"merge_space": space}) for space in ("factors", "product", "product-truncated")]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {"w": reported["w"], "product_gap": reported.get("product_gap")}

    def remark(self, groups: Groups) -> str:
        gap = _mean(groups["factors",], "product_gap")
        return f"Merges of factors and of products differ by {gap} of the product's norm on average."


@register("potara-statistics", title="Source of the statistics", method="potara")
@dataclass(frozen=True)
class Statistics(Sweep):
    """Training or validation data, true or sampled labels.

    The paper takes true labels of training examples; there, a model that has learned its training examples by heart has
    small gradients, which reads as little information. Held-out examples and sampled labels are the safeguards.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    axes: ClassVar = ("variant",)
    columns: ClassVar = (Column("examples used", ("used",), decimals(0)), Column("mean w", ("w",)))
    single: ClassVar = "w"
    title: ClassVar = "Every source"
    figure_title: ClassVar = "Weight and score by source of the statistics"
    note: ClassVar = "A client with fewer examples than the configured number gives all of them."

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [
            ((f"{split}, {fisher}",), {"stat_split": split, "fisher": fisher})
            for split, fisher in itertools.product(("train", "val"), ("empirical", "sampled"))
        ]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {
            "used": int(reported["samples"]),
            **{name: reported[name] for name in ("w", "trace_fed", "trace_local")},
        }

    def remark(self, groups: Groups) -> str:
        paper, *others = groups.values()
        moved = [abs(row["w"] - first["w"]) for mine in others for row, first in zip(mine, paper, strict=True)]
        return (
            f"Another source than the paper's moves a client's weight by {statistics.fmean(moved):.2f} on average, by "
            f"{max(moved):.2f} at most."
        )
