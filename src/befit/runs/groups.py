"""Scores by what is known of clients, such as their language, and who wins how often."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from befit.core.metrics import LOWER_IS_BETTER, Measure

Rows = Mapping[str, Mapping[str, Any]]


def by_group(
    runs: Mapping[str, Rows],
    infos: Mapping[str, Mapping[str, str]],
    key: str,
    metrics: Sequence[str],
    wins: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Every run's mean over the examples of each group, who is best there, and how often each run is.

    runs     per run, its rows: metrics and `examples` by client
    key      of `infos` by which clients are grouped; clients of which it is not known are left out
    metrics  the headline first
    wins     those of the metrics by which a winner is found; None: all, see `counting`
    ->  groups (per group: clients, examples, `scores` by run and metric, winner), wins (by run), and `metrics`, by
        which they were counted

    A group's score is `sum_i n_i m_i / sum_i n_i` over its clients, as FedP2EFT counts languages, and None where
    a run has no score for one of them, since it would then be of other examples. Groups are in order of first clients.
    """
    members: dict[str, list[str]] = {}
    for client, info in infos.items():
        if key in info:
            members.setdefault(info[key], []).append(client)
    counted = counting(metrics, wins)
    groups: dict[str, Any] = {}
    for name, clients in members.items():
        scores = {
            label: {metric: _micro([rows[client] for client in clients], metric) for metric in metrics}
            for label, rows in runs.items()
        }
        examples = max(sum(rows[client]["examples"] for client in clients) for rows in runs.values())
        groups[name] = {
            "clients": len(clients),
            "examples": examples,
            "scores": scores,
            "winner": winner(scores, counted),
        }
    won = {label: sum(group["winner"] == label for group in groups.values()) for label in runs}
    return {"groups": groups, "wins": won, "metrics": counted}


def by_record(
    runs: Mapping[str, Rows], key: str, metrics: Sequence[str], wins: Sequence[str] | None = None
) -> dict[str, Any]:
    """As `by_group`, with groups of examples: those whose records have one value of the field `evaluate.by`.

    key  that field

    A client counts in every group that it has examples of, by so many of them: a group's score is the mean over all
    clients' examples in it. Nothing where the rows have no such scores.
    """
    counts = {
        (client, measure.where): row[name]
        for rows in runs.values()
        for client, row in rows.items()
        for name in row
        if (measure := Measure.named(name)).counts and measure.where is not None
    }
    infos = {json.dumps(part): {key: part[1]} for part in counts}
    parts = {
        label: {
            json.dumps([client, value]): {
                **{metric: rows.get(client, {}).get(str(Measure(metric, where=value))) for metric in metrics},
                "examples": count,
            }
            for (client, value), count in counts.items()
        }
        for label, rows in runs.items()
    }
    return by_group(parts, dict(sorted(infos.items(), key=lambda item: _place(item[1][key]))), key, metrics, wins)


def _place(value: str) -> tuple[bool, int, str]:
    """Numbers by size, then words.

    >>> sorted(["10", "b", "2", "a"], key=_place)
    ['2', '10', 'a', 'b']
    """
    return not value.isdecimal(), int(value) if value.isdecimal() else 0, value


def by_budget(
    runs: Mapping[str, Rows], ranks: Mapping[str, int | None], metrics: Sequence[str]
) -> dict[str, dict[str, Rows]]:
    """The runs that can be compared at each budget "r2", "r4", …, with the metrics as measured there.

    ranks    the rank of every run's method, which is the budget of a run that measured no others
    metrics  the headline first
    ->  nothing where no run measured several budgets; else for each of them the runs that have it

    >>> rows = {"a": {"m": 0.5, "m r2": 0.5, "m r4": 0.6, "examples": 9}}
    >>> found = by_budget({"x": rows, "lora": {"a": {"m": 0.4, "examples": 9}}}, {"x": 2, "lora": 4}, ["m"])
    >>> found["r4"]["x"]["a"]["m"]
    0.6
    """
    per_run = {label: at_budgets(rows, ranks.get(label), metrics) for label, rows in runs.items()}
    measured = {name for rows in runs.values() for name in measured_budgets(rows, metrics[0])}
    budgets = sorted(measured, key=lambda name: int(name[1:]))
    return {
        budget: {label: budgeted[budget] for label, budgeted in per_run.items() if budget in budgeted}
        for budget in budgets
    }


def at_budgets(rows: Rows, rank: int | None, metrics: Sequence[str]) -> dict[str, Rows]:
    """One run's rows at each of its budgets, with the metrics as measured there: those that it measured, else its rank.

    >>> at_budgets({"a": {"m": 0.5, "m r4": 0.6}}, 2, ["m"]), at_budgets({"a": {"m": 0.5}}, 2, ["m"])
    ({'r4': {'a': {'m': 0.6, 'm r4': 0.6}}}, {'r2': {'a': {'m': 0.5}}})
    >>> at_budgets({"a": {"m": 0.5}}, None, ["m"])
    {}
    """
    names = measured_budgets(rows, metrics[0])
    if not names:
        return {} if rank is None or not rows else {f"r{rank}": rows}
    keys = {key: Measure.named(key) for row in rows.values() for key in row}
    measured = {
        name: {key: str(replace(measure, budget=name)) for key, measure in keys.items() if not measure.budget}
        for name in names
    }
    return {
        name: {
            client: {**row, **{key: row.get(at) for key, at in there.items() if key in metrics or at in keys}}
            for client, row in rows.items()
        }
        for name, there in measured.items()
    }


def measured_budgets(rows: Rows, metric: str) -> list[str]:
    """The budgets that a run measured by name, "r2", "r4", …; none for a run that has its rank alone."""
    measures = (Measure.named(key) for row in rows.values() for key in row)
    return list(
        dict.fromkeys(
            measure.budget
            for measure in measures
            if measure.metric == metric and measure.budget and measure.where is None
        )
    )


def counting(metrics: Sequence[str], wins: Sequence[str] | None) -> list[str]:
    """Those of the metrics that were measured, the headline first, by which wins are counted; the headline where none
    of the wanted ones was. Without wishes all are, but those of which less is better.

    >>> counting(["a", "b", "c"], ["c", "b"]), counting(["a"], ["c", "b"]), counting(["a", "calibration_error"], None)
    (['c', 'b'], ['a'], ['a'])
    """
    if wins is None:
        return [metric for metric in metrics if metric not in LOWER_IS_BETTER]
    return [metric for metric in wins if metric in metrics] or [metrics[0]]


def winner(scores: Mapping[str, Mapping[str, float | None]], metrics: Sequence[str]) -> str | None:
    """The run that is strictly best in more than half of the metrics, by unrounded scores; None where there is none.

    With one metric a tie for first place is nobody's win; with three, two of them are needed. Lee et al. 2025a
    (FedP2EFT) count wins without saying how; this rule gives 32 of their 40 printed counts.

    >>> winner({"a": {"m": 0.5}, "b": {"m": 0.4}}, ["m"]), winner({"a": {"m": 0.5}, "b": {"m": 0.5}}, ["m"])
    ('a', None)
    """
    if len(scores) < 2:
        return None
    best = [_strictly_best({label: values[metric] for label, values in scores.items()}) for metric in metrics]
    return next((label for label in scores if 2 * best.count(label) > len(metrics)), None)


def _strictly_best(values: Mapping[str, float | None]) -> str | None:
    known = {label: value for label, value in values.items() if value is not None}
    if len(known) < 2:  # nobody to win against
        return None
    first, second = sorted(known, key=lambda label: known[label], reverse=True)[:2]
    return first if known[first] > known[second] else None


def _micro(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    if any(row.get(metric) is None for row in rows):
        return None
    return sum(row[metric] * row["examples"] for row in rows) / sum(row["examples"] for row in rows)
