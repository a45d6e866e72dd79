"""Every weight from the local to the federated adapter: where the closed form stands, and what trying them costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from befit.methods.potara import merged_trace, weigh
from befit.report.ablation_figures import Bars, Figure, Line, Panel, Point
from befit.report.drawing import MANY
from befit.report.numbers import score_text, seconds_text
from befit.report.table import SECONDS, Cell, Table, decimals, difference, score
from befit.studies.ablations.base import Findings, Measured, Row, register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import clients_of, curve, gain, number, over_seeds, seeds_of

_COMPUTED = "closed form"
Choices = Mapping[str, tuple[str, str | None]]  # title of a choice -> columns of its score and of its weight
Extra = Mapping[str, Callable[[Any], Any]]  # header of a column -> its cell, for a choice or for the row of a client


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


def _mean_table(rows: Sequence[Row], choices: Choices, metric: str, extra: Extra, note: str = "") -> Table:
    """Every choice in the mean over clients; one that no client could make is left out."""
    body = []
    for title, (name, w) in choices.items():
        if (mean := over_seeds(rows, name, score(metric))).value is not None:
            weight = over_seeds(rows, w, decimals(2)) if w else None
            body.append([title, mean, weight, *(cell(name) for cell in extra.values())])
    return Table("Mean over clients", ["weight", metric, "mean w", *extra], body, note)


def _client_table(
    rows: Sequence[Row], choices: Choices, metric: str, about: tuple[str, str], extra: Extra, detail: bool
) -> Table:
    """Every client: how many examples it has (a header and a column), and the score of every choice with its weight."""
    several = len(seeds_of(rows)) > 1
    body = [
        [
            row["client"],
            *[str(row["seed"])] * several,
            row[about[1]],
            *(
                Cell(row[name], score(metric), note=f"({row[w]:.2f})" if w and row[w] is not None else "")
                for name, w in choices.values()
            ),
            *(cell(row) for cell in extra.values()),
        ]
        for row in rows
    ]
    titles = [f"{title} (w)" if w else title for title, (_, w) in choices.items()]
    return Table("Every client", ["client", *["seed"] * several, about[0], *titles, *extra], body, detail=detail)


@register("potara-weight-sweep", title="Weight sweep", method="potara")
@dataclass(frozen=True)
class WeightSweep(Measured):
    """Score every weight; mark the computed one.

    step  distance of two weights; 1 is the federated adapter, 0 the local one

    Zou et al. 2026, Figure 3c. One weight for each client, whatever `granularity` says. The choice on validation
    examples is one a client could make; the one on test examples is an oracle.
    """

    step: float = 0.1

    choices: ClassVar[Choices] = {
        "local alone (w = 0)": ("local", None),
        "federated alone (w = 1)": ("federated", None),
        "w = 0.5": ("half", None),
        _COMPUTED: ("score", "w"),
        "picked on validation": ("validation", "w_validation"),
        "oracle, picked on test": ("oracle", "w_oracle"),
    }

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
        steps = [row for row in rows if not row["computed"]]
        means = {
            w: over_seeds([row for row in steps if row["w"] == w], "score", score(metric)) for w in grid(self.step)
        }
        best = best_weight({w: number(mean) for w, mean in means.items()})
        inner = sum(row["oracle"] > max(row["local"], row["federated"]) for row in picks)
        sentences = [
            f"The closed form's weights ({over_seeds(picks, 'w', decimals(2))} on average) reach "
            f"{over_seeds(picks, 'score', score(metric))}; the oracle's one weight for everybody, {best:g}, picked on "
            f"test examples, reaches {means[best]}.",
            f"At {inner} of {len(picks)} clients some weight of the grid beats both adapters on test examples.",
        ]
        missing = sum(row["w_validation"] is None for row in picks)
        note = f"{missing} clients have no validation examples, so nothing can be picked on them." if missing else ""
        each = {title: choice for title, choice in self.choices.items() if title != "w = 0.5"}
        tables = [
            _mean_table(picks, self.choices, metric, {}, note),
            _client_table(picks, each, metric, ("test examples", "test_examples"), {}, len(seeds_of(rows)) > 1),
        ]
        return Findings(sentences, tables, self._figures(steps, picks))

    def _figures(self, steps: Sequence[Row], picks: Sequence[Row]) -> list[Figure]:
        mean_w, mean = (number(over_seeds(picks, name)) for name in ("w", "score"))
        lines = [curve("test", steps, "w", "score")]
        if all(row["validation"] is not None for row in steps):
            lines.append(curve("validation", steps, "w", "validation", 1))
        mark = Point(f"{_COMPUTED} (mean weight, mean score)", mean_w, mean, 2, drop=True)
        everybody = Figure(
            "Score over the weight, mean over clients",
            "All clients with the same weight, from their local adapter (0) to the federated one (1). The mark is what "
            "clients get with their own computed weights. Bands, with several seeds: one standard deviation over them.",
            [Panel(lines=lines, points=[mark], x="w, the weight of the federated adapter", score=True)],
        )
        note = (
            "Dotted line and dot: the computed weight. Square: the weight picked on the client's validation "
            "examples. Triangle: the best on test examples, an oracle that no client has."
        )
        single = []
        for seed in seeds_of(picks):
            panels = [_panel(steps, pick) for pick in picks if pick["seed"] == seed]
            if len(panels) <= MANY:
                single.append(Figure(f"Every client, seed {seed}", note, panels, columns=5, height=2.3, share_y=True))
        return [everybody, *single]


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
        **{name: computed[name] for name in ("test_examples", "w", "score")},
        "w_validation": chosen,
        "validation": None if chosen is None else steps[chosen]["score"],
        "w_oracle": oracle,
        **{
            name: steps[w]["score"]
            for name, w in (("oracle", oracle), ("local", 0.0), ("federated", 1.0), ("half", half))
        },
    }


def _panel(steps: Sequence[Row], pick: Row) -> Panel:
    mine = [row for row in steps if row["seed"] == pick["seed"] and row["client"] == pick["client"]]
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


@register("potara-grid-search", title="Closed form against grid search", method="potara")
@dataclass(frozen=True)
class GridSearch(Measured):
    """The computed weight against a grid: score and time.

    step  distance of two weights of the grid

    The best on validation examples, and on test examples as an oracle. Zou et al. 2026, Figure 3c. Regret is what
    another choice scores more, on test examples. Seconds are those of a client: one pass for the statistics, against
    one pass over its validation examples for each weight; examples are prepared before.
    """

    step: float = 0.1

    splits: ClassVar[tuple[str, ...]] = ("val",)
    choices: ClassVar[Choices] = {
        _COMPUTED: ("closed", "w_closed"),
        "grid on validation": ("grid", "w_grid"),
        "grid on test (oracle)": ("oracle", "w_oracle"),
    }

    def __post_init__(self) -> None:
        check_step(self.step)

    def measure(self, client: Client) -> Iterator[Row]:
        rule, pair = client.rule({"granularity": "client"}), client.pair()
        for split in {"val", rule.statistics.split}:
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
        ratio = statistics.median(row["seconds_grid"] / row["seconds_closed"] for row in rows)
        took = [seconds_text(statistics.median(row[f"seconds_{name}"] for row in rows)) for name in ("closed", "grid")]
        unit = " points" if "%" in score_text(0.5, metric) else ""
        sentences = [
            f"The grid search on validation examples scores {gain(rows, 'grid', 'closed', metric)}{unit} against the "
            f"closed form; the oracle, which picks on test examples, {gain(rows, 'oracle', 'closed', metric)}{unit}.",
            f"It takes {round(ratio, 1):g} times as long at the median client: {took[1]} against {took[0]}.",
        ]
        everything: Choices = {"local alone": ("local", None), "federated alone": ("federated", None), **self.choices}
        means: Extra = {
            "gain over closed form": lambda name: None if name == "closed" else gain(rows, name, "closed", metric),
            "took in all": lambda name: (
                Cell(sum(row[f"seconds_{name}"] for row in rows), SECONDS) if name in ("closed", "grid") else None
            ),
        }
        each: Extra = {
            "regret to the grid": lambda row: Cell(row["grid"] - row["closed"], difference(metric)),
            "regret to the oracle": lambda row: Cell(row["oracle"] - row["closed"], difference(metric)),
            "closed form took": lambda row: Cell(row["seconds_closed"], SECONDS),
            "grid took": lambda row: Cell(row["seconds_grid"], SECONDS),
        }
        about = "validation examples", "val_examples"
        tables = [
            _mean_table(rows, everything, metric, means),
            _client_table(rows, self.choices, metric, about, each, detail=True),
        ]
        return Findings(sentences, tables, self._figures(rows))

    def _figures(self, rows: Sequence[Row]) -> list[Figure]:
        panels = []
        for seed in seeds_of(rows):
            mine = [row for row in rows if row["seed"] == seed]
            if len(mine) <= MANY:
                bars = [
                    Bars(title, [row[name] for row in mine], ink=ink)
                    for ink, (title, (name, _)) in enumerate(self.choices.items())
                ]
                title = f"seed {seed}" if len(seeds_of(rows)) > 1 else ""
                panels.append(Panel(title, bars=bars, groups=[row["client"] for row in mine], score=True, fits=True))
        note = (
            "On test examples. The oracle picks on the very examples it is scored on, but from the grid: a computed "
            "weight between two of its steps can do better. The axis does not begin at zero."
        )
        return [Figure("Closed form and grid search at every client", note, panels, height=3.0)] if panels else []
