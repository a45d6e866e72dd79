"""Every weight from the local to the federated adapter: where the closed form stands, and what trying them costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from befit.methods.potara import merged_trace, weigh
from befit.report.ablation_figures import Bars, Figure, Line, Panel, Point
from befit.report.drawing import MANY
from befit.report.numbers import score_text, seconds_text
from befit.report.table import SECONDS, Cell, Table, decimals, difference, score
from befit.studies.ablations.base import Findings, MergingAblation, Row, check_rounds, register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import clients_of, curve, gain, number, over_seeds, seeds_of

_COMPUTED = "closed form"
LOSS = decimals(3)
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
    body = [
        [
            *_named(row, rows),
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
    return Table("Every client", [*_names(rows), about[0], *titles, *extra], body, detail=detail)


def _names(rows: Sequence[Row]) -> list[str]:
    """What it takes to tell the rows apart: the client, and seed and round where there are several."""
    return ["client", *(name for name in ("seed", "round") if len({row.get(name) for row in rows}) > 1)]


def _named(row: Row, rows: Sequence[Row]) -> list[str]:
    return [str(row[name]) for name in _names(rows)]


def barrier(losses: Mapping[float, float]) -> float:
    """How far the loss rises above the straight line between its ends, by weight: `max_w L(w) - (1-w) L(0) - w L(1)`.

    At least 0, which both ends have; Zou et al. 2026, eq. 2, of linear mode connectivity.

    >>> barrier({0.0: 1.0, 0.5: 2.5, 1.0: 2.0}), barrier({0.0: 1.0, 0.5: 0.5, 1.0: 2.0})
    (1.0, 0.0)
    """
    return max(loss - (1 - w) * losses[0.0] - w * losses[1.0] for w, loss in losses.items())


@register("potara-weight-sweep", title="Weight sweep", method="potara")
@dataclass(frozen=True)
class WeightSweep(MergingAblation):
    """Score every weight; mark the computed one.

    step    distance of two weights; 1 is the federated adapter, 0 the local one
    rounds  the rounds of FedIT after which to sweep, such as [100, 200, 400]; null takes the last

    Zou et al. 2026, Figure 4, and Figure 3c. One weight for each client, whatever `granularity` says. The choice on
    validation examples is one a client could make; the one on test examples is an oracle. The barrier is how far the
    loss on test examples, on the grid, rises above the straight line between its ends (eq. 2): 0 where the two adapters
    are linearly connected.
    """

    step: float = 0.1
    rounds: tuple[int, ...] | None = None

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
        check_rounds(self.rounds)

    def checkpoints(self, total: int) -> Sequence[int]:
        return super().checkpoints(total) if self.rounds is None else self.rounds

    def measure(self, client: Client) -> Iterator[Row]:
        rule = client.rule({"granularity": "client"})
        validated, tested = client.count("val") > 0, client.count(client.host.experiment.evaluate.split)
        for round_ in sorted(set(self.rounds or [client.rounds])):
            pair = client.pair(round_)
            _, numbers = weigh(pair.moments(rule), rule)
            traces = numbers["trace_fed"], numbers["trace_local"], numbers["trace_shared"]
            rows: list[Row] = []
            for w, computed in [*((w, False) for w in grid(self.step)), (numbers["w"], True)]:
                state = pair.merged(w, rule)
                rows.append(
                    {
                        "round": round_,
                        "w": w,
                        "computed": computed,
                        "score": pair.score(state),
                        "loss": pair.loss(state),
                        "validation": pair.score(state, "val") if validated else None,
                        "trace": merged_trace(*traces, w),
                        "test_examples": tested,
                    }
                )
            rise = barrier({row["w"]: row["loss"] for row in rows if not row["computed"]})
            yield from ({**row, "barrier": rise} for row in rows)

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        single: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            single.setdefault((row["seed"], row["client"], row["round"]), []).append(row)
        picks = [_picks(of_client) for of_client in single.values()]
        rounds = sorted({row["round"] for row in rows})
        last = [pick for pick in picks if pick["round"] == rounds[-1]]
        steps = [row for row in rows if not row["computed"]]
        means = {
            round_: {
                w: over_seeds([row for row in steps if (row["round"], row["w"]) == (round_, w)], "score", score(metric))
                for w in grid(self.step)
            }
            for round_ in rounds
        }
        best = {round_: best_weight({w: number(mean) for w, mean in cells.items()}) for round_, cells in means.items()}
        inner = sum(row["oracle"] > max(row["local"], row["federated"]) for row in last)
        farthest = max(last, key=lambda pick: pick["barrier"])
        sentences = [
            f"The closed form's weights ({over_seeds(last, 'w', decimals(2))} on average) reach "
            f"{over_seeds(last, 'score', score(metric))}; the oracle's one weight for everybody, "
            f"{best[rounds[-1]]:g}, picked on test examples, reaches {means[rounds[-1]][best[rounds[-1]]]}.",
            f"At {inner} of {len(last)} clients some weight of the grid beats both adapters on test examples.",
            f"The loss rises above the straight line between both adapters by {over_seeds(last, 'barrier', LOSS)} on "
            f"average, by {farthest['barrier']:.3f} at most ({farthest['client']}{_seed_words(last, farthest)})."
            if farthest["barrier"] > 0
            else "The loss stays below the straight line between both adapters at every client: there is no barrier.",
        ]
        if len(rounds) > 1:
            where = ", ".join(f"{best[round_]:g} after round {round_}" for round_ in rounds)
            sentences.append(
                f"One weight for everybody is best, on test examples, at {where}; all else is of round {rounds[-1]}."
            )
        missing = sum(row["w_validation"] is None for row in last)
        note = f"{missing} clients have no validation examples, so nothing can be picked on them." if missing else ""
        choices = {title: choice for title, choice in self.choices.items() if title != "w = 0.5"}
        mean = _mean_table(last, self.choices, metric, {}, note)
        tables = [
            replace(mean, title=f"{mean.title}, after round {rounds[-1]}") if len(rounds) > 1 else mean,
            _path_table(picks, rounds, best, metric),
            _client_table(picks, choices, metric, ("test examples", "test_examples"), _LOSSES, "seed" in _names(picks)),
        ]
        return Findings(sentences, tables, self._figures(steps, picks, rounds))

    def _figures(self, steps: Sequence[Row], picks: Sequence[Row], rounds: Sequence[int]) -> list[Figure]:
        of = {round_: [row for row in steps if row["round"] == round_] for round_ in rounds}
        named = {round_: f"after round {round_}" if len(rounds) > 1 else "test" for round_ in rounds}
        lines = [curve(named[round_], of_round, "w", "score", ink) for ink, (round_, of_round) in enumerate(of.items())]
        if len(rounds) == 1 and all(row["validation"] is not None for row in steps):
            lines.append(curve("validation", steps, "w", "validation", 1))
        marks = []
        for ink, round_ in enumerate(rounds):
            round_picks = [pick for pick in picks if pick["round"] == round_]
            mean_w, mean = (number(over_seeds(round_picks, name)) for name in ("w", "score"))
            marks.append(
                Point(f"{_COMPUTED} (mean weight, mean score)", mean_w, mean, ink if len(rounds) > 1 else 2, drop=True)
            )
        everybody = Figure(
            "Score over the weight, mean over clients",
            "All clients with the same weight, from their local adapter (0) to the federated one (1). The mark is what "
            "clients get with their own computed weights. Bands, with several seeds: one standard deviation over them.",
            [Panel(lines=lines, points=marks, x="w, the weight of the federated adapter", score=True)],
        )
        losses = [curve(named[round_], of_round, "w", "loss", ink) for ink, (round_, of_round) in enumerate(of.items())]
        path = Figure(
            "Loss along the path, mean over clients",
            "On test examples. Where it stays below the straight line between its ends there is no barrier.",
            [Panel(lines=losses, x="w, the weight of the federated adapter", y="loss")],
        )
        note = "Dotted line and dot: the computed weight. " + (
            "Triangle: the best on test examples, an oracle that no client has. One curve for each round of FedIT."
            if len(rounds) > 1
            else "Square: the weight picked on the client's validation examples. Triangle: the best on test examples, "
            "an oracle that no client has."
        )
        single = []
        for seed in seeds_of(picks):
            clients = clients_of(picks, seed)
            panels = [
                _panel(client, steps, [pick for pick in picks if (pick["seed"], pick["client"]) == (seed, client)])
                for client in clients
            ]
            if len(panels) <= MANY:
                single.append(Figure(f"Every client, seed {seed}", note, panels, columns=5, height=2.3, share_y=True))
        return [everybody, path, *single]


def _seed_words(picks: Sequence[Row], chosen: Row) -> str:
    """Of which seed a row is, where there are several."""
    return f", seed {chosen['seed']}" if len(seeds_of(picks)) > 1 else ""


def _picks(rows: Sequence[Row]) -> Row:
    """One client after one round: the computed weight, the two picks, and the score of each."""
    steps = {row["w"]: row for row in rows if not row["computed"]}
    computed = next(row for row in rows if row["computed"])
    oracle = best_weight({w: row["score"] for w, row in steps.items()})
    chosen = None
    if all(row["validation"] is not None for row in rows):
        chosen = best_weight({w: row["validation"] for w, row in steps.items()})
    half = best_weight({w: -abs(w - 0.5) for w in steps})
    return {
        **{name: computed[name] for name in ("seed", "client", "round", "test_examples", "w", "score", "barrier")},
        "w_validation": chosen,
        "validation": None if chosen is None else steps[chosen]["score"],
        "w_oracle": oracle,
        **{
            name: steps[w]["score"]
            for name, w in (("oracle", oracle), ("local", 0.0), ("federated", 1.0), ("half", half))
        },
        **{f"loss_{name}": steps[w]["loss"] for name, w in (("local", 0.0), ("federated", 1.0))},
    }


_LOSSES: Extra = {
    title: lambda row, name=name: Cell(row[name], LOSS)
    for title, name in {"loss, w = 0": "loss_local", "loss, w = 1": "loss_federated", "barrier": "barrier"}.items()
}


def _path_table(picks: Sequence[Row], rounds: Sequence[int], best: Mapping[int, float], metric: str) -> Table:
    """One line for each round: what the two ends score, where the peak is, and the loss between them."""
    body = []
    for round_ in rounds:
        round_picks = [pick for pick in picks if pick["round"] == round_]
        body.append(
            [
                str(round_),
                *(over_seeds(round_picks, name, score(metric)) for name in ("local", "federated")),
                *(over_seeds(round_picks, name, decimals(2)) for name in ("w", "w_oracle")),
                Cell(best[round_], decimals(2)),
                over_seeds(round_picks, "barrier", LOSS),
                Cell(max(pick["barrier"] for pick in round_picks), LOSS),
            ]
        )
    headers = [
        "FedIT rounds",
        "local",
        "federated",
        "computed w",
        "each client's best w",
        "best w for everybody",
        "barrier",
        "largest of a client",
    ]
    note = (
        "Best weights are picked on test examples. The barrier is max over w of L(w) - (1-w) L(0) - w L(1), L the mean "
        "loss on test examples, at the weights of the grid; 0 is linear mode connectivity."
    )
    return Table("The path from the local to the federated adapter", headers, body, note)


def _panel(client: str, steps: Sequence[Row], picks: Sequence[Row]) -> Panel:
    """One client's curve after each round, or, where there is one round, also that of its validation examples."""
    lines, points = list[Line](), list[Point]()
    for number_, pick in enumerate(picks):
        of = ("seed", "client", "round")
        rows = [row for row in steps if all(row[name] == pick[name] for name in of)]
        places = [row["w"] for row in rows]
        several = len(picks) > 1
        title = f"after round {pick['round']}" if several else "test"
        lines.append(Line(title, places, [row["score"] for row in rows], ink=number_, marker=False))
        points += [
            Point(_COMPUTED, pick["w"], pick["score"], number_ if several else 2, drop=True),
            Point("oracle on test", pick["w_oracle"], pick["oracle"], number_ if several else 4, "^"),
        ]
        if not several and pick["w_validation"] is not None:
            lines.append(Line("validation", places, [row["validation"] for row in rows], ink=1, marker=False))
            points.append(Point("picked on validation", pick["w_validation"], pick["validation"], 3, "s"))
    return Panel(client, lines, points, x="w", score=True)


@register("potara-grid-search", title="Closed form against grid search", method="potara")
@dataclass(frozen=True)
class GridSearch(MergingAblation):
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
        per_client: Extra = {
            "regret to the grid": lambda row: Cell(row["grid"] - row["closed"], difference(metric)),
            "regret to the oracle": lambda row: Cell(row["oracle"] - row["closed"], difference(metric)),
            "closed form took": lambda row: Cell(row["seconds_closed"], SECONDS),
            "grid took": lambda row: Cell(row["seconds_grid"], SECONDS),
        }
        about = "validation examples", "val_examples"
        tables = [
            _mean_table(rows, everything, metric, means),
            _client_table(rows, self.choices, metric, about, per_client, detail=True),
        ]
        return Findings(sentences, tables, self._figures(rows))

    def _figures(self, rows: Sequence[Row]) -> list[Figure]:
        panels = []
        for seed in seeds_of(rows):
            of_seed = [row for row in rows if row["seed"] == seed]
            if len(of_seed) <= MANY:
                bars = [
                    Bars(title, [row[name] for row in of_seed], ink=ink)
                    for ink, (title, (name, _)) in enumerate(self.choices.items())
                ]
                title = f"seed {seed}" if len(seeds_of(rows)) > 1 else ""
                panels.append(Panel(title, bars=bars, groups=[row["client"] for row in of_seed], score=True, fits=True))
        note = (
            "On test examples. The oracle picks on the very examples it is scored on, but from the grid: a computed "
            "weight between two of its steps can do better. The axis does not begin at zero."
        )
        return [Figure("Closed form and grid search at every client", note, panels, height=3.0)] if panels else []
