"""How many examples the statistics need: what the weight does when others are drawn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from befit.methods.potara import weigh
from befit.report.table import Cell, decimals
from befit.studies.ablations.base import MergingAblation, Row, register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.tabulated import Groups, Tabulated, mean


def _moving(rows: Sequence[Row]) -> list[Row]:
    """The clients with more than M examples."""
    return [row for row in rows if row["w_std"] is not None]


def _largest(rows: Sequence[Row]) -> Cell:
    return Cell(max((row["w_std"] for row in rows), default=None), decimals(3))


@register("potara-samples", title="Examples for the statistics", method="potara")
@dataclass(frozen=True)
class Samples(MergingAblation, Tabulated):
    """How far the weight moves when other examples are drawn.

    samples  the numbers of examples, M
    draws    how often they are drawn; the first draw is that of a run

    A client with no more than M examples gives all of them in every draw: its weight does not move, and so it does not
    count in the spread.
    """

    samples: tuple[int, ...] = (5, 10, 30, 100)
    draws: int = 10

    axes: ClassVar = ("samples",)
    columns: ClassVar = (
        ("examples used", mean("used", 0)),
        ("SD of w over draws", mean("w_std")),
        ("largest of a client", lambda rows: _largest(_moving(rows))),
        ("clients with more", lambda rows: Cell(f"{len(_moving(rows))} of {len(rows)}")),
        ("mean w", mean("w_mean")),
    )
    panels: ClassVar = (("w_std", "spread of the weight over draws", "standard deviation of w"),)
    title: ClassVar = "Every number of examples"
    figure_title: ClassVar = "Weight and score over the number of examples"
    note: ClassVar = "The spread is that of clients with more than M examples; scores are those of the first draw."

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 1:
            raise ValueError(f"samples: must be whole numbers from 1 on, got {list(self.samples)}")
        if self.draws < 2:
            raise ValueError(f"draws: a spread needs at least 2, got {self.draws}")

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule(), client.pair()
        for samples in self.samples:
            wanted = replace(rule, statistics=replace(rule.statistics, samples=samples))
            weights, numbers = weigh(pair.moments(wanted), wanted)
            used, ws = int(numbers["samples"]), [numbers["w"]]
            varies = used < client.count(rule.statistics.split)
            ws += [weigh(pair.moments(wanted, draw), wanted)[1]["w"] for draw in range(1, self.draws) if varies]
            yield {
                "samples": samples,
                "used": used,
                "w": numbers["w"],
                "w_mean": statistics.fmean(ws),
                "w_std": statistics.stdev(ws) if varies else None,
                "score": pair.score(pair.merged(weights, rule)),
            }

    def remark(self, groups: Groups) -> str:
        moved = []
        for (samples,), rows in groups.items():
            if counted := _moving(rows):
                few = f" (of {len(counted)} of {len(rows)} clients)" if len(counted) < len(rows) else ""
                moved.append(f"{mean('w_std')(counted)} at M = {samples}{few}")
        if not moved:
            return "No client has more examples than the smallest M, so nothing can be drawn anew."
        return f"Standard deviation of a client's weight over {self.draws} draws of examples: {', '.join(moved)}."
