"""Where the Fisher information comes from: training or held-out examples, true or sampled labels."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from befit.methods.potara import weigh
from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import MANY
from befit.report.numbers import NOTHING
from befit.studies.ablations.base import Ablation, Findings, Row, Titled
from befit.studies.ablations.pairs import Client
from befit.studies.ablations.registry import register
from befit.studies.ablations.summary import clients_of, mean_bars, seeds_of, spread

_VARIANTS = [(split, fisher) for split in ("train", "val") for fisher in ("empirical", "sampled")]


@register("potara-statistics", title="Source of the statistics", method="potara")
@dataclass(frozen=True)
class Statistics(Ablation):
    """Training or validation data, true or sampled labels.

    The paper takes true labels of training examples; there, a model that has learned its training examples by heart has
    small gradients, which reads as little information. Held-out examples and sampled labels are the safeguards.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def options(self) -> Mapping[str, Any]:
        return {"stat_split": "val", "fisher": "sampled"}

    def measure(self, client: Client) -> Iterator[Row]:
        pair, rule = client.pair(), client.rule()
        ends = {"federated": pair.score_at(1.0, rule), "local": pair.score_at(0.0, rule)}
        for split, fisher in _VARIANTS:
            rule = client.rule(stat_split=split, fisher=fisher)
            weights, numbers = weigh(pair.moments(rule), rule)
            yield {
                "variant": f"{split}, {fisher}",
                "used": int(numbers["samples"]),
                "w": numbers["w"],
                "trace_fed": numbers["trace_fed"],
                "trace_local": numbers["trace_local"],
                "score": pair.score(pair.merged(weights, rule)),
                **ends,
            }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        names = list(dict.fromkeys(row["variant"] for row in rows))
        groups = {name: [row for row in rows if row["variant"] == name] for name in names}
        members = list(groups.values())
        table = []
        for name, mine in groups.items():
            w, score, used = (spread(mine, column) for column in ("w", "score", "used"))
            assert w and score and used
            least, most = min(row["w"] for row in mine), max(row["w"] for row in mine)
            table.append([name, f"{used.mean:.0f}", w.number(3), f"{least:.2f} to {most:.2f}", score.score(metric)])
        table += [
            [title, NOTHING, NOTHING, NOTHING, found.score(metric)]
            for title, found in (("local alone", spread(rows, "local")), ("federated alone", spread(rows, "federated")))
            if found
        ]
        sentences = _sentences(groups, metric)
        figures = [
            Figure(
                "Weight and score by source of the statistics",
                "Mean over clients; whiskers: one standard deviation over seeds. The axis of the score does not begin "
                "at zero.",
                [
                    Panel("weight", bars=[mean_bars("", members, "w")], groups=names, y="mean w", limits=(0, 1.02)),
                    Panel("score", bars=[mean_bars("", members, "score")], groups=names, score=True, fits=True),
                ],
                columns=2,
                height=3.2,
            )
        ]
        for seed in seeds_of(rows):
            clients = clients_of(rows, seed)
            if len(clients) <= MANY:
                bars = [
                    Bars(name, [row["w"] for row in mine if row["seed"] == seed], ink=ink)
                    for ink, (name, mine) in enumerate(groups.items())
                ]
                panel = Panel(bars=bars, groups=clients, y="w", limits=(0, 1.02))
                figures.append(Figure(f"Weight of every client, seed {seed}", "", [panel], height=2.6))
        headers = ["statistics", "examples used", "mean w", "weights of clients", metric]
        note = "A client with fewer examples than the configured number gives all of them."
        return Findings(sentences, [Titled("Every source", (headers, table), note)], figures)


def _sentences(groups: Mapping[str, Sequence[Row]], metric: str) -> list[str]:
    words = []
    for name, mine in groups.items():
        w, score = spread(mine, "w"), spread(mine, "score")
        assert w and score
        words.append(f"{name} {score.score(metric)} with a mean weight of {w.number()}")
    first, *others = words
    moved = [
        abs(row["w"] - groups["train, empirical"][place]["w"])
        for name, mine in groups.items()
        if name != "train, empirical"
        for place, row in enumerate(mine)
    ]
    return [
        f"The paper's statistics, {first}; {'; '.join(others)}.",
        f"Another source moves a client's weight by {statistics.fmean(moved):.2f} on average, "
        f"by {max(moved):.2f} at most.",
    ]
