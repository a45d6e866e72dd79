"""Who is best in each group of clients at each budget, over seeds (Lee et al. 2025a, FedP2EFT)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from befit.config.experiment import EvaluateSettings
from befit.core.metrics import group_keys, spread
from befit.report.numbers import score_of
from befit.runs.groups import Rows, by_group, by_record, counting, winner
from befit.studies.compare.collect import FinishedRun
from befit.studies.compare.results import AtBudget, BudgetRow, BudgetScores, GroupScores, Scored, SpreadOfSeeds, Wins
from befit.studies.compare.series import Setup, metrics_of, setups_of, who_was_measured

Grouped = Callable[[Mapping[str, Rows]], dict[str, Any]]  # one seed's rows by run to its groups
_DIGITS = 12  # means that agree to so many are equal: adding the same scores in another order changes the last ones


def budget_means(runs: Sequence[FinishedRun]) -> list[BudgetScores]:
    """The mean over clients and its spread over seeds of every series at every budget; nothing without budgets.

    One entry for clients, and one for newcomers where they were measured.
    """
    setups, budgets = setups_of(runs)
    if budgets == [""]:
        return []
    metric = next(cell.metric for run in runs for cell in run.cells)
    entries: list[BudgetScores] = []
    for who in who_was_measured(runs):
        rows: list[BudgetRow] = []
        for setup in setups:
            for series in setup.series:
                measured = {name: at for name in budgets if (at := series.at(name, who)) is not None}
                if not measured:
                    continue
                means = {
                    name: [mean for rows in seeds.values() if (mean := _mean(rows, metric)) is not None]
                    for name, (_, seeds) in measured.items()
                }
                rows.append(
                    {
                        "setup": setup.title,
                        "method": series.label,
                        "scores": {name: _spread(values) for name, values in means.items()},
                        "runs": {name: label for name, (label, _) in measured.items()},
                    }
                )
        if rows:
            entries.append({"pool": who, "budgets": budgets, "rows": rows})
    return entries


def wins_of(runs: Sequence[FinishedRun]) -> list[Wins]:
    """One entry for clients and one for newcomers, for each setup and each property of theirs, such as their language,
    or of their examples.

    A method's score in a group is the mean over seeds of `sum_i n_i m_i / sum_i n_i` over the group's clients, or over
    their examples in the group where the records say which those are (`evaluate.by`). Only seeds count that all methods
    of a setup and budget have, so that each number of a row is of the same seeds. The best method is
    strictly ahead in the headline, or with several metrics in more than half of them (`evaluate.wins`).
    """
    setups, budgets = setups_of(runs)
    cells = [(run, cell) for run in runs for cell in run.cells]
    metrics = metrics_of(cells[0][1], cells[0][0]) if cells else [""]
    evaluate = cells[0][0].run.cells[0].experiment.evaluate if cells else EvaluateSettings()
    counted = counting(metrics, evaluate.wins)
    of_examples: list[str] = [] if evaluate.by is None else [evaluate.by]
    entries: list[Wins] = []
    for who in who_was_measured(runs):
        for setup in setups:
            for key in dict.fromkeys([*_keys(setup, budgets, who), *of_examples]):
                grouped = partial(_of_records if key == evaluate.by else _of_clients, key=key, metrics=metrics)
                at = {name: _at(setup, name, who, grouped, metrics, counted) for name in budgets}
                if any(_several(group["scores"]) for scored in at.values() for group in scored["groups"].values()):
                    entries.append(
                        {
                            "pool": who,
                            "setup": setup.title,
                            "by": key,
                            "of": "examples" if key == evaluate.by else "clients",
                            "metrics": counted,
                            "budgets": budgets,
                            "methods": [series.label for series in setup.series],
                            "at": at,
                        }
                    )
    return entries


def _several(scores: Mapping[str, Any]) -> bool:
    """Whether at least two methods have a score, so that one can win."""
    return sum(score is not None for score in scores.values()) > 1


def _keys(setup: Setup, budgets: Sequence[str], who: str) -> list[str]:
    measured = (at for series in setup.series for name in budgets if (at := series.at(name, who)) is not None)
    of_seeds = (rows for _, seeds in measured for rows in seeds.values())
    return list(dict.fromkeys(key for rows in of_seeds for key in group_keys(_infos(rows))))


def _infos(rows: Rows) -> dict[str, Mapping[str, str]]:
    return {client: row.get("info") or {} for client, row in rows.items()}


def _at(
    setup: Setup, budget: str, who: str, grouped: Grouped, metrics: Sequence[str], counted: Sequence[str]
) -> AtBudget:
    """All groups at one budget: scores by the first of the metrics, the best by those that count; then these alone."""
    runs = {series.label: at for series in setup.series if (at := series.at(budget, who)) is not None}
    seeds = sorted(set.intersection(*(set(by_seed) for _, by_seed in runs.values()))) if runs else []
    groups = [grouped({label: by_seed[seed] for label, (_, by_seed) in runs.items()}) for seed in seeds]
    result: AtBudget = {
        "seeds": seeds,
        "left_out": sorted(set().union(*groups) - set.intersection(*map(set, groups))) if groups else [],
        "runs": {label: run for label, (run, _) in runs.items()},
        **_scored(groups, list(runs), metrics[0], counted),
    }
    if others := [metric for metric in counted if metric != metrics[0]]:
        result["other_metrics"] = {metric: _scored(groups, list(runs), metric, [metric]) for metric in others}
    return result


def _scored(
    by_seed: Sequence[Mapping[str, Any]], methods: Sequence[str], metric: str, deciding: Sequence[str]
) -> Scored:
    """Of the groups of every seed, the scores in one metric, and who is best by the deciding ones."""
    names = [name for name in (by_seed[0] if by_seed else {}) if all(name in groups for groups in by_seed)]
    groups: dict[str, GroupScores] = {}
    for name in names:
        over_seeds = {
            label: {
                key: _all_known([seed[name]["scores"][label][key] for seed in by_seed])
                for key in dict.fromkeys([metric, *deciding])
            }
            for label in methods
        }
        means = {
            label: {
                key: None if values is None else round(statistics.fmean(values), _DIGITS)
                for key, values in scores.items()
            }
            for label, scores in over_seeds.items()
        }
        best = winner(means, deciding)
        groups[name] = {
            "clients": round(statistics.fmean(seed[name]["clients"] for seed in by_seed)),
            "examples": round(statistics.fmean(seed[name]["examples"] for seed in by_seed)),
            "scores": {label: _spread(scores[metric]) for label, scores in over_seeds.items()},
            "best": best,
            "tied": [] if best else _tied({label: scores[metric] for label, scores in means.items()}),
        }
    means_by_seed = {
        label: _all_known([_mean_of_all([seed[name]["scores"][label][metric] for name in names]) for seed in by_seed])
        for label in methods
    }
    measured = {label for label in methods if any(group["scores"][label] is not None for group in groups.values())}
    rivals = measured if len(measured) > 1 else set[str]()
    return {
        "groups": groups,
        "mean": {label: _spread(values) for label, values in means_by_seed.items()},
        "wins": {
            label: sum(group["best"] == label for group in groups.values()) if label in rivals else None
            for label in methods
        },
        "nobody": sum(not group["best"] and _several(group["scores"]) for group in groups.values()),
    }


def _of_clients(runs: Mapping[str, Rows], key: str, metrics: Sequence[str]) -> dict[str, Any]:
    """One seed's groups of clients."""
    shared = _shared(runs)
    return by_group(shared, _infos(next(iter(shared.values()))), key, metrics)["groups"]


def _of_records(runs: Mapping[str, Rows], key: str, metrics: Sequence[str]) -> dict[str, Any]:
    """One seed's groups of examples."""
    return by_record(_shared(runs), key, metrics)["groups"]


def _shared(runs: Mapping[str, Rows]) -> dict[str, Rows]:
    """Keep the clients that every run has, so that groups are comparable."""
    common = [client for client in next(iter(runs.values())) if all(client in rows for rows in runs.values())]
    return {label: {client: rows[client] for client in common} for label, rows in runs.items()}


def _all_known(values: Sequence[float | None]) -> list[float] | None:
    """The values, or None where one is missing."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if known and len(known) == len(values) else None


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else statistics.fmean(known)


def _tied(scores: Mapping[str, float | None]) -> list[str]:
    """The methods that share the first place."""
    known = {label: value for label, value in scores.items() if value is not None}
    first = [label for label, value in known.items() if value == max(known.values())]
    return first if len(first) > 1 else []


def _mean(rows: Rows, metric: str) -> float | None:
    known = [value for row in rows.values() if (value := score_of(row, metric)) is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Sequence[float] | None) -> SpreadOfSeeds | None:
    over = spread(values or [])
    return None if over is None or not values else {**over, "population_sd": statistics.pstdev(values)}
