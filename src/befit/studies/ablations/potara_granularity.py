"""One weight for a client, or one for each factor, layer, tensor or coordinate; with and without the correlation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from befit.methods.potara import Granularity, weigh
from befit.report.ablation_figures import Figure, Panel
from befit.report.numbers import NOTHING
from befit.studies.ablations.base import Ablation, Findings, Row, Titled
from befit.studies.ablations.pairs import Client
from befit.studies.ablations.registry import register
from befit.studies.ablations.summary import Spread, mean_bars, spread
from befit.train.paired_fisher import Variances

_ALL: tuple[Granularity, ...] = get_args(Granularity)


@register("potara-granularity", title="Granularity and correlation", method="potara")
@dataclass(frozen=True)
class GranularitySweep(Ablation):
    """One weight, or many, to the single coordinate.

    granularities  those to compare, from coarse to fine

    Each with and without the correlation. The paper has one weight per client; refining a partition can only lower
    the total trace. Whether it raises the score is the question. Traces are shares of the better parent's, `min(a,
    b)`, at each client.
    """

    granularities: tuple[Granularity, ...] = _ALL

    def options(self) -> Mapping[str, Any]:
        return {"granularity": "coordinate"}

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule(granularity="client"), client.pair()
        moments = pair.moments(rule)
        ends = {"federated": pair.score_at(1.0, rule), "local": pair.score_at(0.0, rule)}
        for correlation in (True, False):
            for granularity in self.granularities:
                how = replace(rule, granularity=granularity, correlation=correlation)
                weights, numbers = weigh(moments, how)
                variances = moments.variances(how.damping, correlation, how.center, how.rho_shrink)
                total = numbers.get("trace_merged_groups", numbers["trace_merged"])
                if granularity == "coordinate":
                    total = coordinate_trace(variances)
                least = min(numbers["trace_fed"], numbers["trace_local"])
                yield {
                    "granularity": granularity,
                    "correlation": correlation,
                    "w": numbers["w"],
                    "w_min": numbers.get("w_min", numbers["w"]),
                    "w_max": numbers.get("w_max", numbers["w"]),
                    "trace": total / least if least > 0 else None,
                    "score": pair.score(pair.merged(weights, rule)),
                    **ends,
                }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        kinds = list(dict.fromkeys(row["granularity"] for row in rows))
        groups = {
            on: [[row for row in rows if row["granularity"] == kind and row["correlation"] is on] for kind in kinds]
            for on in (True, False)
        }
        table = []
        for on, name in ((True, "on"), (False, "off")):
            for kind, mine in zip(kinds, groups[on], strict=True):
                trace, score = spread(mine, "trace"), spread(mine, "score")
                low, high = spread(mine, "w_min"), spread(mine, "w_max")
                table.append(
                    [
                        kind,
                        name,
                        trace.number(3) if trace else NOTHING,
                        score.score(metric) if score else NOTHING,
                        _range(low, high),
                    ]
                )
        bars = {
            value: [
                mean_bars(f"correlation {name}", groups[on], value, ink)
                for ink, (on, name) in enumerate(((True, "on"), (False, "off")))
            ]
            for value in ("trace", "score")
        }
        figure = Figure(
            "Total optimal trace and score by granularity",
            "Left: the trace that the weights reach, as a share of the better parent's; lower is a tighter bound. "
            "Right: score on test examples; its axis does not begin at zero. Mean over clients; whiskers: one standard "
            "deviation over seeds. With correlation off, coordinates are Fisher merging.",
            [
                Panel("total optimal trace", bars=bars["trace"], groups=kinds, y="share of the better parent's"),
                Panel("score", bars=bars["score"], groups=kinds, score=True, fits=True),
            ],
            columns=2,
            height=3.6,
        )
        headers = ["granularity", "correlation", "total trace", metric, "weights, mean range"]
        note = (
            "Traces with the correlation on and off come from different estimates of the same errors: compare them "
            "only within one setting."
        )
        return Findings(
            _sentences(rows, kinds, metric), [Titled("Every granularity", (headers, table), note)], [figure]
        )


def _range(low: Spread | None, high: Spread | None) -> str:
    if low is None or high is None:
        return NOTHING
    ends = [f"{one.mean:.2f}" for one in (low, high)]
    return " to ".join(dict.fromkeys(ends))


def _sentences(rows: Sequence[Row], kinds: Sequence[str], metric: str) -> list[str]:
    first, last = kinds[0], kinds[-1]
    found = {}
    for kind in (first, last):
        mine = [row for row in rows if row["granularity"] == kind and row["correlation"]]
        found[kind] = spread(mine, "trace"), spread(mine, "score")
    words = [
        f"{kind} weights reach {trace.number(3)} of the better parent's trace and score {score.score(metric)}"
        for kind, (trace, score) in found.items()
        if trace and score
    ]
    return [f"With correlation, {'; '.join(words)}."] if words else ["Both adapters are the same at every client."]


def coordinate_trace(variances: Variances) -> float:
    """`sum_j (v_f v_l - c^2) / (v_f + v_l - 2c)`, the least trace when every coordinate has its own weight.

    Where that is flat, both ends are alike: `v_f`. Zou et al. 2026, eqs. 17 and 18, coordinate by coordinate.
    """
    v_f, v_l, c = variances.fed, variances.local, variances.cross
    curvature = v_f + v_l - 2 * c
    flat = curvature <= 1e-12 * (v_f + v_l)
    # c may be min(v_f, v_l): written so that no two nearly equal products are subtracted.
    least = v_f - (v_f - c).square() / curvature.where(~flat, curvature.new_ones(()))
    return float(v_f.where(flat, least).sum())
