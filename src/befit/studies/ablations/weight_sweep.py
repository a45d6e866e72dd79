"""Every weight from the local to the federated adapter, and where the closed form stands among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from befit.methods.potara import merged_trace, weigh
from befit.report.ablation_figures import Figure, Line, Panel, Point
from befit.report.drawing import MANY
from befit.report.numbers import NOTHING, score_text
from befit.report.table import Table
from befit.studies.ablations.base import Findings, Measured, Row
from befit.studies.ablations.registry import register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import clients_of, curve, seeds_of, spread

_COMPUTED = "closed form"


@register("potara-weight-sweep", title="Weight sweep", method="potara")
@dataclass(frozen=True)
class WeightSweep(Measured):
    """Score every weight; mark the computed one.

    step  distance of two weights; 1 is the federated adapter, 0 the local one

    Zou et al. 2026, Figure 4. One weight for each client, whatever `granularity` says. The choice on
    validation examples is one a client could make; the one on test examples is an oracle.
    """

    step: float = 0.1

    def __post_init__(self) -> None:
        check_step(self.step)

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule({"granularity": "client"}), client.pair()
        _, numbers = weigh(pair.moments(rule), rule)
        traces = numbers["trace_fed"], numbers["trace_local"], numbers["trace_shared"]
        validated, tested = client.count("val") > 0, client.count(client.host.experiment.evaluate.split)
        for w, computed in [*((w, False) for w in grid(self.step)), (numbers["w"], True)]:
            state = pair.merged(w, rule)
            yield {
                "w": w,
                "computed": computed,
                "score": pair.score(state),
                "validation": pair.score(state, "val") if validated else None,
                "trace": merged_trace(*traces, w),
                "test_examples": tested,
            }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        picks = [_picks(rows, seed, client) for seed in seeds_of(rows) for client in clients_of(rows, seed)]
        return Findings(_sentences(rows, picks, metric), _tables(picks, metric), _figures(rows, picks))


def _picks(rows: Sequence[Row], seed: int, client: str) -> Row:
    """One client: the computed weight, the two picks, and the score of each."""
    mine = [row for row in rows if row["seed"] == seed and row["client"] == client]
    steps = {row["w"]: row for row in mine if not row["computed"]}
    computed = next(row for row in mine if row["computed"])
    oracle = best_weight({w: row["score"] for w, row in steps.items()})
    chosen = None
    if all(row["validation"] is not None for row in mine):
        chosen = best_weight({w: row["validation"] for w, row in steps.items()})
    half = best_weight({w: -abs(w - 0.5) for w in steps})
    return {
        "seed": seed,
        "client": client,
        "test_examples": computed["test_examples"],
        "w": computed["w"],
        "score": computed["score"],
        "w_validation": chosen,
        "validation": None if chosen is None else steps[chosen]["score"],
        "w_oracle": oracle,
        "oracle": steps[oracle]["score"],
        "local": steps[0.0]["score"],
        "federated": steps[1.0]["score"],
        "half": steps[half]["score"],
    }


def _sentences(rows: Sequence[Row], picks: Sequence[Row], metric: str) -> list[str]:
    inner = sum(row["oracle"] > max(row["local"], row["federated"]) for row in picks)
    steps = [row for row in rows if not row["computed"]]
    means = {w: spread([row for row in steps if row["w"] == w], "score") for w in {row["w"] for row in steps}}
    best = best_weight({w: found.mean for w, found in means.items() if found})
    computed, at_best, w = spread(picks, "score"), means[best], spread(picks, "w")
    assert computed and at_best and w
    return [
        f"The closed form's weights ({w.number()} on average) reach {computed.score(metric)}; the oracle's one "
        f"weight for everybody, {best:g}, picked on test examples, reaches {at_best.score(metric)}.",
        f"At {inner} of {len(picks)} clients some weight of the grid beats both adapters on test examples.",
    ]


def _tables(picks: Sequence[Row], metric: str) -> list[Table]:
    named = {
        "local alone (w = 0)": ("local", None),
        "federated alone (w = 1)": ("federated", None),
        "w = 0.5": ("half", None),
        "closed form": ("score", "w"),
        "picked on validation": ("validation", "w_validation"),
        "oracle, picked on test": ("oracle", "w_oracle"),
    }
    means = []
    for title, (score, w) in named.items():
        found, weight = spread(picks, score), spread(picks, w) if w else None
        if found:
            means.append([title, found.score(metric), weight.number() if weight else NOTHING])
    several = len(seeds_of(picks)) > 1
    each = [
        [
            row["client"],
            *[str(row["seed"])] * several,
            str(row["test_examples"]),
            *(score_text(row[name], metric) for name in ("local", "federated")),
            *(_at(row[score], row[w], metric) for score, w in named.values() if w),
        ]
        for row in picks
    ]
    headers = [
        "client",
        *["seed"] * several,
        "test examples",
        "local",
        "federated",
        *(f"{title} (w)" for title, (_, w) in named.items() if w),
    ]
    missing = sum(row["w_validation"] is None for row in picks)
    note = f"{missing} clients have no validation examples, so nothing can be picked on them." if missing else ""
    return [
        Table("Mean over clients", ["weight", metric, "mean w"], means, note),
        Table("Every client", headers, each, detail=several),
    ]


def _at(score: float | None, w: float | None, metric: str) -> str:
    return NOTHING if score is None or w is None else f"{score_text(score, metric)} ({w:.2f})"


def _figures(rows: Sequence[Row], picks: Sequence[Row]) -> list[Figure]:
    steps = [row for row in rows if not row["computed"]]
    mean_w, mean = spread(picks, "w"), spread(picks, "score")
    assert mean_w and mean
    mark = Point(f"{_COMPUTED} (mean weight, mean score)", mean_w.mean, mean.mean, 2, drop=True)
    lines = [curve("test", steps, "w", "score")]
    if all(row["validation"] is not None for row in steps):
        lines.append(curve("validation", steps, "w", "validation", 1))
    figures = [
        Figure(
            "Score over the weight, mean over clients",
            "All clients with the same weight, from their local adapter (0) to the federated one (1). The mark is what "
            "clients get with their own computed weights. Bands, with several seeds: one standard deviation over them.",
            [Panel(lines=lines, points=[mark], x="w, the weight of the federated adapter", score=True)],
        )
    ]
    for seed in seeds_of(rows):
        clients = clients_of(rows, seed)
        if len(clients) > MANY:
            continue
        panels = [
            _panel(rows, next(p for p in picks if p["seed"] == seed and p["client"] == client)) for client in clients
        ]
        figures.append(
            Figure(
                f"Every client, seed {seed}",
                "Dotted line and dot: the computed weight. Square: the weight picked on the client's validation "
                "examples. Triangle: the best on test examples, an oracle that no client has.",
                panels,
                columns=5,
                height=2.3,
                share_y=True,
            )
        )
    return figures


def _panel(rows: Sequence[Row], pick: Row) -> Panel:
    mine = [
        row for row in rows if row["seed"] == pick["seed"] and row["client"] == pick["client"] and not row["computed"]
    ]
    places = [row["w"] for row in mine]
    lines = [Line("test", places, [row["score"] for row in mine], marker=False)]
    points = [
        Point(_COMPUTED, pick["w"], pick["score"], 2, drop=True),
        Point("oracle on test", pick["w_oracle"], pick["oracle"], 4, "^"),
    ]
    if pick["w_validation"] is not None:
        lines.append(Line("validation", places, [row["validation"] for row in mine], ink=1, marker=False))
        points.append(Point("picked on validation", pick["w_validation"], pick["validation"], 3, "s"))
    return Panel(pick["client"], lines, points, x="w", score=True)


def grid(step: float) -> list[float]:
    """Weights from 0 to 1, both included.

    >>> grid(0.25)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    count = round(1 / step)
    return [place / count for place in range(count + 1)]


def check_step(step: float) -> None:
    """Raise ValueError unless steps of this size lead from 0 to 1."""
    if not 0 < step <= 1 or abs(round(1 / step) * step - 1) > 1e-9:
        raise ValueError(f"step: must divide 1 into equal parts, such as 0.1 or 0.05, got {step}")


def best_weight(scores: Mapping[float, float]) -> float:
    """The weight with the best score; of equal ones that closest to one half, and then the smaller.

    Small splits have many ties, and the middle of them is the least extreme choice that they allow.

    >>> best_weight({0.0: 0.8, 0.5: 0.9, 1.0: 0.9})
    0.5
    """
    return max(scores, key=lambda w: (scores[w], -abs(w - 0.5), -w))
