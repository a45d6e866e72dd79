"""How much the weight, and the merged model, hang on the damping of the Fisher information."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from befit.methods.potara import weigh
from befit.report.ablation_figures import Figure, Panel
from befit.report.numbers import NOTHING
from befit.studies.ablations.base import Ablation, Findings, Row, Titled
from befit.studies.ablations.pairs import Client
from befit.studies.ablations.registry import register
from befit.studies.ablations.summary import curve, spread, thin_lines


@register("potara-damping", title="Damping", method="potara")
@dataclass(frozen=True)
class DampingSweep(Ablation):
    """How weight and score hang on the damping of 1/F.

    deltas  sizes of the damping, of the configured kind

    The statistics stay, only `delta` changes. Damping is ours (docs/methods/potara.md): it shrinks the weight towards
    one half, and too little of it lets a few coordinates decide.
    """

    deltas: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

    def __post_init__(self) -> None:
        if not self.deltas or not min(self.deltas) > 0:
            raise ValueError(f"deltas: must be positive numbers, got {list(self.deltas)}")

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule(), client.pair()
        moments = pair.moments(rule)
        ends = {"federated": pair.score_at(1.0, rule), "local": pair.score_at(0.0, rule)}
        for delta in self.deltas:
            weights, numbers = weigh(moments, replace(rule, damping=rule.damping.with_delta(delta)))
            score = pair.score(pair.merged(weights, rule))
            yield {"delta": delta, "w": numbers["w"], "damped_share": numbers["damped_share"], "score": score, **ends}

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        at = {delta: [row for row in rows if row["delta"] == delta] for delta in sorted({row["delta"] for row in rows})}
        found = {
            delta: (spread(mine, "w"), spread(mine, "score"), spread(mine, "damped_share"))
            for delta, mine in at.items()
        }
        table = [
            [
                f"{delta:.0e}",
                w.number(3) if w else NOTHING,
                f"{100 * damped.mean:.1f}%" if damped else NOTHING,
                score.score(metric) if score else NOTHING,
            ]
            for delta, (w, score, damped) in found.items()
        ]
        ws = {delta: w.mean for delta, (w, _, _) in found.items() if w}
        scores = {delta: score for delta, (_, score, _) in found.items() if score}
        low, high = min(scores, key=lambda d: scores[d].mean), max(scores, key=lambda d: scores[d].mean)
        sentences = [
            f"From delta {min(ws):.0e} to {max(ws):.0e} the mean weight goes from {ws[min(ws)]:.3f} to "
            f"{ws[max(ws)]:.3f}; scores lie between {scores[low].score(metric)} (delta {low:.0e}) and "
            f"{scores[high].score(metric)} (delta {high:.0e}), on test examples."
        ]
        flat = [
            curve(title, rows, "delta", name, ink)
            for ink, (name, title) in enumerate({"local": "local alone", "federated": "federated alone"}.items(), 1)
        ]
        figure = Figure(
            "Weight and score over the damping",
            "Left: every client's weight (thin) and the mean. Right: mean over clients, with one standard deviation "
            "over seeds. A delta chosen by the right side would be chosen on test examples.",
            [
                Panel(
                    "weight",
                    [*thin_lines(rows, "delta", "w"), curve("merged", rows, "delta", "w")],
                    x="delta",
                    y="w, the weight of the federated adapter",
                    log=True,
                    limits=(0, 1.02),
                ),
                Panel("score", [curve("merged", rows, "delta", "score"), *flat], x="delta", score=True, log=True),
            ],
            columns=2,
            height=3.8,
        )
        note = "Damped: entries of the statistics with less Fisher information than the damping adds."
        headers = ["delta", "mean w", "damped", metric]
        return Findings(sentences, [Titled("Every size of the damping", (headers, table), note)], [figure])
