"""Interpolate A and B, or their product: what the cross term is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.merge.pair import comparison
from befit.methods.potara import weigh
from befit.report.ablation_figures import Bars, Figure, Panel
from befit.report.drawing import MANY
from befit.studies.ablations.base import Ablation, Findings, Row, Titled
from befit.studies.ablations.pairs import Client
from befit.studies.ablations.registry import register
from befit.studies.ablations.summary import clients_of, mean_bars, seeds_of, spread

_SPACES = ("factors", "product", "product-truncated")


@register("potara-merge-space", title="Merge space", method="potara")
@dataclass(frozen=True)
class MergeSpace(Ablation):
    """Merge A and B, their product, or that cut to the rank.

    With the same weights. The paper merges factors (appendix B): `B_m A_m = w B_f A_f + (1-w) B_l A_l - w (1-w) (B_f -
    B_l)(A_f - A_l)`. The product gap is the size of the last term over that of the first two.
    """

    def options(self) -> Mapping[str, Any]:
        return {"merge_space": "product"}

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule(), client.pair()
        weights, numbers = weigh(pair.moments(rule), rule)
        gap = comparison(pair.fed, pair.local, numbers["w"])["product_gap"]
        for space in _SPACES:
            how = client.rule(merge_space=space)
            score = pair.score(pair.merged(weights, how))
            yield {"space": space, "w": numbers["w"], "product_gap": gap, "score": score}

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        groups = {space: [row for row in rows if row["space"] == space] for space in _SPACES}
        table, scores = [], {}
        for space, mine in groups.items():
            score, w = spread(mine, "score"), spread(mine, "w")
            assert score and w
            scores[space] = score
            table.append([space, score.score(metric), w.number()])
        gap = spread(groups["factors"], "product_gap")
        assert gap
        sentences = [
            f"Merging factors scores {scores['factors'].score(metric)}, merging products exactly "
            f"{scores['product'].score(metric)}, cut to the rank {scores['product-truncated'].score(metric)}.",
            f"The two merges differ by {gap.number(3)} of the product's norm on average.",
        ]
        panels = [
            Panel(
                "mean over clients",
                bars=[mean_bars("", list(groups.values()), "score")],
                groups=_SPACES,
                score=True,
                fits=True,
            )
        ]
        figures = [
            Figure(
                "Score by merge space",
                "Mean over clients; whiskers: one standard deviation over several "
                "seeds. The axis does not begin at zero.",
                panels,
                height=3.0,
            )
        ]
        for seed in seeds_of(rows):
            clients = clients_of(rows, seed)
            if len(clients) <= MANY:
                bars = [
                    Bars(space, [row["score"] for row in mine if row["seed"] == seed], ink=ink)
                    for ink, (space, mine) in enumerate(groups.items())
                ]
                panel = Panel(bars=bars, groups=clients, score=True, fits=True)
                note = "The axis does not begin at zero."
                figures.append(Figure(f"Every client, seed {seed}", note, [panel], height=3.0))
        return Findings(sentences, [Titled("Every space", (["space", metric, "mean w"], table))], figures)
