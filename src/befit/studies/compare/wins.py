"""Who is best in each group of clients at each budget, over seeds (Lee et al. 2025, FedP2EFT)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from befit.config.experiment import EvaluateSettings
from befit.core.metrics import group_keys
from befit.report.numbers import score_of
from befit.runs.groups import Rows, budget_metrics, by_group, by_record, counting, winner
from befit.studies.compare.collect import Finished
from befit.studies.compare.series import Setup, metrics_of, pools_of, setups_of
from befit.studies.compare.statistics import spread

__all__ = ["budget_means", "wins_of"]

Grouped = Callable[[Mapping[str, Rows]], dict[str, Any]]  # one seed's rows by run to its groups
_DIGITS = 12  # to which two means are equal: sums of the same scores in another order are


def budget_means(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """The mean over clients and its spread over seeds of every series at every budget; nothing without budgets.

    One entry for clients, and one for newcomers where they were measured: `pool`, `budgets`, and `rows` with `setup`,
    `method`, and by budget `runs` (labels) and `scores`.
    """
    setups, budgets = setups_of(runs)
    if budgets == [""]:
        return []
    metric = next(cell.metric for run in runs for cell in run.cells)
    made = []
    for pool in pools_of(runs):
        rows = []
        for setup in setups:
            for series in setup.series:
                found = {name: at for name in budgets if (at := series.at(name, pool)) is not None}
                scores = {
                    name: _spread([mean for rows in seeds.values() if (mean := _mean(rows, metric)) is not None])
                    for name, (_, seeds) in found.items()
                }
                rows.append(
                    {
                        "setup": setup.title,
                        "method": series.label,
                        "scores": scores,
                        "runs": {name: label for name, (label, _) in found.items()},
                    }
                )
        made.append({"pool": pool, "budgets": budgets, "rows": [row for row in rows if row["runs"]]})
    return [one for one in made if one["rows"]]


def wins_of(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """One entry for each pool, setup and thing that is known of clients, such as their language, or of their examples.

    ->  pool ("clients" or "newcomers"), setup, by (language), of ("clients" or "examples"), metrics (by which wins are
        counted), budgets, methods (labels of series), and per budget: `at` with seeds, runs (labels), `groups`
        (clients, examples, `scores` per method: a spread or None; best, tied), `mean` (over groups, per method), `wins`
        (per method; None without score or rival), and `nobody`: groups that nobody wins. Where metrics other than
        the headline count, `other_metrics` has the last four of each of them, with the best and the wins by it alone

    A method's score in a group is the mean over seeds of `sum_i n_i m_i / sum_i n_i` over the group's clients, or over
    their examples in the group where the records say which those are (`evaluate.by`). Only seeds count that all methods
    of a setup and budget have, so that each number of a row is of the same seeds. The best is who is strictly ahead in
    the headline, or with several metrics in more than half of them (`evaluate.wins`).
    """
    setups, budgets = setups_of(runs)
    cells = [(run, cell) for run in runs for cell in run.cells]
    metrics = metrics_of(cells[0][1], cells[0][0]) if cells else [""]
    if budgets != [""]:
        metrics = budget_metrics([cell.rows for _, cell in cells], metrics)
    evaluate = cells[0][0].run.cells[0].experiment.evaluate if cells else EvaluateSettings()
    counted = counting(metrics, evaluate.wins)
    made = []
    for pool in pools_of(runs):
        for setup in setups:
            of_examples: list[str] = [] if evaluate.by is None else [evaluate.by]
            for key in dict.fromkeys([*_keys(setup, budgets, pool), *of_examples]):
                found = partial(_of_records if key == evaluate.by else _of_clients, key=key, metrics=metrics)
                at = {name: _at(setup, name, pool, found, metrics, counted) for name in budgets}
                if any(_several(group["scores"]) for one in at.values() for group in one["groups"].values()):
                    of = "examples" if key == evaluate.by else "clients"
                    made.append(
                        {
                            "pool": pool,
                            "setup": setup.title,
                            "by": key,
                            "of": of,
                            "metrics": counted,
                            "budgets": budgets,
                            "methods": [series.label for series in setup.series],
                            "at": at,
                        }
                    )
    return made


def _several(scores: Mapping[str, Any]) -> bool:
    """Whether there is somebody to win against."""
    return sum(one is not None for one in scores.values()) > 1


def _keys(setup: Setup, budgets: Sequence[str], pool: str) -> list[str]:
    found = (at for series in setup.series for name in budgets if (at := series.at(name, pool)) is not None)
    rows = (rows for _, seeds in found for rows in seeds.values())
    return list(dict.fromkeys(key for one in rows for key in group_keys(_infos(one))))


def _infos(rows: Rows) -> dict[str, Mapping[str, str]]:
    return {client: row.get("info") or {} for client, row in rows.items()}


def _at(
    setup: Setup, budget: str, pool: str, grouped: Grouped, metrics: Sequence[str], counted: Sequence[str]
) -> dict[str, Any]:
    """All groups at one budget: scores by the first of the metrics, the best by those that count; then these alone."""
    found = {series.label: at for series in setup.series if (at := series.at(budget, pool)) is not None}
    seeds = _common([set(by_seed) for _, by_seed in found.values()])
    made = [grouped({label: by_seed[seed] for label, (_, by_seed) in found.items()}) for seed in seeds]
    others = {metric: _scored(made, list(found), metric, [metric]) for metric in counted if metric != metrics[0]}
    return {
        "seeds": seeds,
        "runs": {label: run for label, (run, _) in found.items()},
        **_scored(made, list(found), metrics[0], counted),
        **({"other_metrics": others} if others else {}),
    }


def _scored(
    made: Sequence[Mapping[str, Any]], methods: Sequence[str], metric: str, deciding: Sequence[str]
) -> dict[str, Any]:
    """Of the groups of every seed, the scores in one metric, and who is best by the deciding ones."""
    names = [name for name in (made[0] if made else {}) if all(name in one for one in made)]
    groups: dict[str, Any] = {}
    for name in names:
        over = {
            label: {
                one: _all_of([seed[name]["scores"][label][one] for seed in made])
                for one in dict.fromkeys([metric, *deciding])
            }
            for label in methods
        }
        means = {
            label: {
                one: None if values is None else round(statistics.fmean(values), _DIGITS)
                for one, values in found.items()
            }
            for label, found in over.items()
        }
        best = winner(means, deciding)
        groups[name] = {
            "clients": made[0][name]["clients"],
            "examples": made[0][name]["examples"],
            "scores": {label: _spread(found[metric]) for label, found in over.items()},
            "best": best,
            "tied": [] if best else _tied({label: found[metric] for label, found in means.items()}),
        }
    means_by_seed = {
        label: _all_of([_all_mean([seed[name]["scores"][label][metric] for name in names]) for seed in made])
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
    """The clients of which all runs have a row, so that a group is of the same ones."""
    known = [client for client in next(iter(runs.values())) if all(client in rows for rows in runs.values())]
    return {label: {client: rows[client] for client in known} for label, rows in runs.items()}


def _common(sets: Sequence[set[int]]) -> list[int]:
    return sorted(set.intersection(*sets)) if sets else []


def _all_of(values: Sequence[float | None]) -> list[float] | None:
    """The values, or None where one is missing."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if known and len(known) == len(values) else None


def _all_mean(values: Sequence[float | None]) -> float | None:
    known = _all_of(values)
    return None if known is None else statistics.fmean(known)


def _tied(scores: Mapping[str, float | None]) -> list[str]:
    """Who shares the first place."""
    known = {label: value for label, value in scores.items() if value is not None}
    first = [label for label, value in known.items() if value == max(known.values())]
    return first if len(first) > 1 else []


def _mean(rows: Rows, metric: str) -> float | None:
    known = [value for row in rows.values() if (value := score_of(row, metric)) is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Sequence[float] | None) -> dict[str, Any] | None:
    """Mean, SD with n - 1 as everywhere in a comparison, and with n as papers print it."""
    found = spread(values or [])
    if found is None or not values:
        return None
    return {"mean": found.mean, "sd": found.sd, "population_sd": statistics.pstdev(values), "n": len(values)}
