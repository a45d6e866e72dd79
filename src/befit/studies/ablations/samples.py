"""How many examples the statistics need: what the weight does when others are drawn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from befit.methods.potara import weigh
from befit.report.ablation_figures import Figure, Panel
from befit.report.numbers import NOTHING
from befit.report.table import Table
from befit.studies.ablations.base import Findings, Measured, Row
from befit.studies.ablations.registry import register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import curve, spread, thin_lines


@register("potara-samples", title="Examples for the statistics", method="potara")
@dataclass(frozen=True)
class Samples(Measured):
    """How far the weight moves when other examples are drawn.

    samples  the numbers of examples, M
    draws    how often they are drawn; the first draw is that of a run

    Ours; the paper has M = 30. A client with no more than M examples gives all of them in every draw: its
    weight does not move, and so it does not count in the spread.
    """

    samples: tuple[int, ...] = (5, 10, 30, 100)
    draws: int = 10

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 1:
            raise ValueError(f"samples: must be whole numbers from 1 on, got {list(self.samples)}")
        if self.draws < 2:
            raise ValueError(f"draws: a spread needs at least 2, got {self.draws}")

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule(), client.pair()
        for samples in self.samples:
            wanted = replace(rule, samples=samples)
            weights, numbers = weigh(pair.moments(wanted), wanted)
            used, ws = int(numbers["samples"]), [numbers["w"]]
            varies = used < client.count(rule.split)
            ws += [weigh(pair.moments(wanted, draw), wanted)[1]["w"] for draw in range(1, self.draws) if varies]
            yield {
                "samples": samples,
                "used": used,
                "w": numbers["w"],
                "w_mean": statistics.fmean(ws),
                "w_std": statistics.stdev(ws) if varies else None,
                "score": pair.score(pair.merged(weights, rule)),
            }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        table, moved = [], {}
        for samples in sorted({row["samples"] for row in rows}):
            mine = [row for row in rows if row["samples"] == samples]
            counted = [row for row in mine if row["w_std"] is not None]
            std, w, score, used = (spread(mine, name) for name in ("w_std", "w_mean", "score", "used"))
            if std:
                few = f" (of {len(counted)} of {len(mine)} clients)" if len(counted) < len(mine) else ""
                moved[samples] = f"{std.mean:.3f} at M = {samples}{few}"
            table.append(
                [
                    str(samples),
                    f"{used.mean:.0f}" if used else NOTHING,
                    std.number(3) if std else NOTHING,
                    f"{max(row['w_std'] for row in counted):.3f}" if counted else NOTHING,
                    f"{len(counted)} of {len(mine)}",
                    w.number(3) if w else NOTHING,
                    score.score(metric) if score else NOTHING,
                ]
            )
        headers = [
            "M",
            "examples used",
            "std of w over draws",
            "largest of a client",
            "clients with more than M",
            "mean w",
            metric,
        ]
        note = "A client with at most M examples gives all of them in every draw and does not count in the spread."
        figure = Figure(
            "Weight and score over the number of examples",
            f"Left: standard deviation of the weight over {self.draws} draws, of every client with more than M "
            "examples (thin) and their mean. Right: score with the first draw, mean over clients; band: one standard "
            "deviation over seeds.",
            [
                Panel(
                    "spread of the weight",
                    [*thin_lines(rows, "samples", "w_std"), curve("mean over clients", rows, "samples", "w_std")],
                    x="M",
                    y="standard deviation of w",
                    log=True,
                ),
                Panel("score", [curve("mean over clients", rows, "samples", "score")], x="M", score=True, log=True),
            ],
            columns=2,
            height=3.6,
        )
        sentences = ["No client has more examples than the smallest M, so nothing can be drawn anew."]
        if moved:
            words = ", ".join(moved.values())
            sentences = [f"Standard deviation of a client's weight over {self.draws} draws of examples: {words}."]
        return Findings(sentences, [Table("Every number of examples", headers, table, note)], [figure])
