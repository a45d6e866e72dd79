"""The closed form against trying eleven weights: what it loses, and what it saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from befit.methods.potara import weigh
from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import MANY
from befit.report.numbers import NOTHING, gain_text, score_text, seconds_text
from befit.report.table import Table
from befit.studies.ablations.base import Findings, Measured, Row
from befit.studies.ablations.registry import register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import clients_of, difference, seeds_of, spread, times
from befit.studies.ablations.weight_sweep import best_weight, check_step, grid

_CHOICES = {"closed": "closed form", "grid": "grid on validation", "oracle": "grid on test (oracle)"}


@register("potara-grid-search", title="Closed form against grid search", method="potara")
@dataclass(frozen=True)
class GridSearch(Measured):
    """The computed weight against a grid: score and time.

    step  distance of two weights of the grid

    The best on validation examples, and on test examples as an oracle. Zou et al. 2026, Figure 3c.
    Regret is what another choice scores more, on test examples. Seconds are those of a client: one pass for the
    statistics, against one pass over its validation examples for each weight; examples are prepared before.
    """

    step: float = 0.1
    splits: ClassVar[tuple[str, ...]] = ("val",)

    def __post_init__(self) -> None:
        check_step(self.step)

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule({"granularity": "client"}), client.pair()
        for split in {"val", rule.split}:
            client.count(split)  # prepares the examples, which neither side is charged for
        begin = time.perf_counter()
        _, numbers = weigh(pair.moments(rule), rule)
        closed = pair.merged(numbers["w"], rule)
        between = time.perf_counter()
        chosen = best_weight({w: pair.score_at(w, rule, "val") for w in grid(self.step)})
        end = time.perf_counter()
        on_test = {w: pair.score_at(w, rule) for w in grid(self.step)}
        oracle = best_weight(on_test)
        yield {
            "w_closed": numbers["w"],
            "closed": pair.score(closed),
            "w_grid": chosen,
            "grid": on_test[chosen],
            "w_oracle": oracle,
            "oracle": on_test[oracle],
            "local": on_test[0.0],
            "federated": on_test[1.0],
            "seconds_closed": between - begin,
            "seconds_grid": end - between,
            "val_examples": client.count("val"),
        }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        regret, oracle = difference(rows, "grid", "closed"), difference(rows, "oracle", "closed")
        assert regret and oracle
        ratio = statistics.median(row["seconds_grid"] / row["seconds_closed"] for row in rows)
        took = [statistics.median(row[f"seconds_{name}"] for row in rows) for name in ("closed", "grid")]
        unit = " points" if "%" in score_text(0.5, metric) else ""
        sentences = [
            f"The grid search on validation examples scores {regret.gain(metric)}{unit} against the closed form; the "
            f"oracle, which picks on test examples, {oracle.gain(metric)}{unit}.",
            f"It takes {times(ratio)} as long at the median client: {seconds_text(took[1])} against "
            f"{seconds_text(took[0])}.",
        ]
        return Findings(sentences, self._tables(rows, metric), _figures(rows))

    def _tables(self, rows: Sequence[Row], metric: str) -> list[Table]:
        means = []
        for name, title in {"local": "local alone", "federated": "federated alone", **_CHOICES}.items():
            found, gap = spread(rows, name), difference(rows, name, "closed")
            weight = spread(rows, f"w_{name}") if name in _CHOICES else None
            assert found and gap
            means.append(
                [
                    title,
                    found.score(metric),
                    NOTHING if name == "closed" else gap.gain(metric),
                    weight.number() if weight else NOTHING,
                    seconds_text(sum(row[f"seconds_{name}"] for row in rows))
                    if name in ("closed", "grid")
                    else NOTHING,
                ]
            )
        several = len(seeds_of(rows)) > 1
        each = [
            [
                row["client"],
                *[str(row["seed"])] * several,
                str(row["val_examples"]),
                f"{row['w_closed']:.3f}",
                f"{row['w_grid']:g}",
                f"{row['w_oracle']:g}",
                *(score_text(row[name], metric) for name in _CHOICES),
                gain_text(row["grid"] - row["closed"], metric),
                gain_text(row["oracle"] - row["closed"], metric),
                seconds_text(row["seconds_closed"]),
                seconds_text(row["seconds_grid"]),
            ]
            for row in rows
        ]
        headers = [
            "client",
            *["seed"] * several,
            "validation examples",
            "w",
            "w of the grid",
            "oracle w",
            *_CHOICES.values(),
            "regret to the grid",
            "regret to the oracle",
            "closed form took",
            "grid took",
        ]
        return [
            Table("Mean over clients", ["weight", metric, "gain over closed form", "mean w", "took in all"], means),
            Table("Every client", headers, each, detail=True),
        ]


def _figures(rows: Sequence[Row]) -> list[Figure]:
    panels = []
    for seed in seeds_of(rows):
        clients = clients_of(rows, seed)
        mine = [row for row in rows if row["seed"] == seed]
        if len(clients) <= MANY:
            bars = [
                Bars(title, [row[name] for row in mine], ink=ink) for ink, (name, title) in enumerate(_CHOICES.items())
            ]
            several = len(seeds_of(rows)) > 1
            panels.append(Panel(f"seed {seed}" if several else "", bars=bars, groups=clients, score=True, fits=True))
    note = (
        "On test examples. The oracle picks on the very examples it is scored on, but from the grid: a computed weight "
        "between two of its steps can do better. The axis does not begin at zero."
    )
    return [Figure("Closed form and grid search at every client", note, panels, height=3.0)] if panels else []
