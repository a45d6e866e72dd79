"""Budgets and wins as tables: how often each method is best, and the scores that it is read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.report.numbers import NOTHING, listing, plain, spread_text
from befit.report.table import Table

__all__ = ["OVERALL", "Words", "alone", "budget_name", "budget_tables", "count_or_nothing", "win_rows", "wins_tables"]

FEW_GROUPS, MANY_METHODS = 8, 8  # more methods than these in no more groups: groups are the columns
WINS_NOTE = (
    "Best in a group is who is strictly ahead in its score, over all of its test examples and the mean over seeds, "
    "however little; a tie is nobody's. A count, and no statement that a difference is more than chance."
)
GROUPS_NOTE = (
    "Mean ± SD over seeds (n - 1; papers that divide by n print sqrt((n - 1) / n) of it). A group's score is over all "
    "of its test examples."
)
ALONE_NOTE = "Ahead is who is strictly best in this metric alone."


@dataclass(frozen=True)
class Words:
    """How a table of groups calls who is best in one, and in how many a method is."""

    best: str
    wins: str


OVERALL, IN_ONE_METRIC = Words("best", "wins"), Words("ahead", "ahead")


def budget_tables(results: Mapping[str, Any]) -> list[Table]:
    """The mean over clients of every method at every budget, clients and newcomers apart."""
    made = []
    for one in results.get("budgets", []):
        based = any(row["setup"] for row in one["rows"])
        headers = ["method", *["setup"] * based, *map(budget_name, one["budgets"])]
        rows = [
            [
                plain(row["method"]),
                *[plain(row["setup"])] * based,
                *(spread_text(row["scores"].get(name), results["metric"]) for name in one["budgets"]),
            ]
            for row in one["rows"]
        ]
        newcomers = one["pool"] == "newcomers"
        note = f"Mean over {one['pool']}, ± SD over seeds. A budget is a run's rank, or one of those that it measured."
        made.append(Table("Budgets" + ", newcomers" * newcomers, headers, rows, note))
    return made


def wins_tables(results: Mapping[str, Any]) -> list[Table]:
    """How often each method is best, for each pool and thing that is known of clients; then all groups, as details."""
    wins: Sequence[Mapping[str, Any]] = results.get("wins", [])
    counted: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in wins:
        counted.setdefault((one["pool"], by_text(one)), []).append(one)
    made = [_counts(results["metric"], pool, by, found) for (pool, by), found in counted.items()]
    for one in wins:
        made.append(_groups(results["metric"], one, f"{GROUPS_NOTE}{_metrics_note(results['metric'], one)}"))
        made += [
            _groups(metric, only, f"{GROUPS_NOTE} {ALONE_NOTE}", words, metric) for metric, only, words in alone(one)
        ]
    return made


def alone(one: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], Words]]:
    """Of one entry of compare.json's `wins`, every metric beside the headline that counts, and the entry with the
    scores, the best and the wins of that metric alone."""
    others = dict.fromkeys(metric for at in one["at"].values() for metric in at.get("other_metrics", ()))
    for metric in others:
        at = {name: {**at, **at["other_metrics"][metric]} for name, at in one["at"].items()}
        yield metric, {**one, "at": at}, IN_ONE_METRIC


def _counts(metric: str, pool: str, by: str, found: Sequence[Mapping[str, Any]]) -> Table:
    based, budgets = any(one["setup"] for one in found), found[0]["budgets"]
    names = [budget_name(name) if name else "wins" for name in budgets]
    headers = ["method", *["setup"] * based, *names, *["all"] * (len(budgets) > 1)]
    rows = []
    for one in found:
        lines = {label: [one["at"][name]["wins"].get(label) for name in budgets] for label in one["methods"]}
        lines["nobody"] = [one["at"][name]["nobody"] for name in budgets]
        for label, counts in lines.items():
            known = [count for count in counts if count is not None]
            total = [str(sum(known)) if known else NOTHING] * (len(budgets) > 1)
            shown = [count_or_nothing(count) for count in counts]
            rows.append([plain(label), *[plain(one["setup"])] * based, *shown, *total])
    title = f"Wins by {by}" + (", newcomers" if pool == "newcomers" else "")
    return Table(title, headers, rows, f"{WINS_NOTE}{_metrics_note(metric, found[0])}{_seeds_note(found)}")


def by_text(one: Mapping[str, Any]) -> str:
    """What divides clients, or their examples, into groups."""
    return plain(one["by"]) + " of the examples" * (one.get("of") == "examples")


def _metrics_note(headline: str, one: Mapping[str, Any]) -> str:
    """By what the best is found, where it is not by the headline alone."""
    if one["metrics"] == [headline]:
        return ""
    return f" Ahead in {'more than half of ' * (len(one['metrics']) > 1)}{listing(one['metrics'])}."


def _seeds_note(found: Sequence[Mapping[str, Any]]) -> str:
    """Which seeds, where not all budgets and setups have the same."""
    seeds = {tuple(at["seeds"]) for one in found for at in one["at"].values() if at["groups"]}
    return (
        ""
        if len(seeds) < 2
        else " Not all rows are of the same seeds: only those count that all methods of a row have."
    )


def _groups(metric: str, one: Mapping[str, Any], note: str, words: Words = OVERALL, name: str = "") -> Table:
    """Every group's scores in one metric at every budget, who is best, and the mean over groups."""
    parts = [f"Scores by {by_text(one)}", *[plain(one["setup"])] * bool(one["setup"])]
    title = ", ".join([*parts, *["newcomers"] * (one["pool"] == "newcomers"), *[plain(name)] * bool(name)])
    table = _narrow(metric, one, words) if _turned(one) else _wide(metric, one, words)
    return Table(title, *table, note, detail=True)


def _turned(one: Mapping[str, Any]) -> bool:
    groups = max(len(at["groups"]) for at in one["at"].values())
    return len(one["methods"]) > MANY_METHODS and groups <= FEW_GROUPS


def _wide(metric: str, one: Mapping[str, Any], words: Words) -> Any:
    """Methods are columns; the rows of a budget stand together and end with the mean over groups."""
    methods, budgeted = one["methods"], one["budgets"] != [""]
    headers = [*["budget"] * budgeted, plain(one["by"]), "test examples", *map(plain, methods), words.best]
    rows = []
    for budget, at in one["at"].items():
        start = [budget_name(budget)] * budgeted
        for name, group in at["groups"].items():
            scores = (spread_text(group["scores"].get(label), metric) for label in methods)
            rows.append([*start, plain(name), str(group["examples"]), *scores, best_text(group)])
        if at["groups"]:
            means = (spread_text(at["mean"].get(label), metric) for label in methods)
            rows.append([*start, "mean", "", *means, ""])
    return headers, rows


def _narrow(metric: str, one: Mapping[str, Any], words: Words) -> Any:
    """Groups are columns; the last row of a budget says who is best."""
    budgeted = one["budgets"] != [""]
    names = list(dict.fromkeys(name for at in one["at"].values() for name in at["groups"]))
    headers = ["method", *["budget"] * budgeted, *map(plain, names), "mean", words.wins]
    rows = []
    for budget, at in one["at"].items():
        middle = [budget_name(budget)] * budgeted
        groups = [at["groups"].get(name, {"scores": {}, "best": None, "tied": []}) for name in names]
        for label in (label for label in one["methods"] if label in at["wins"]):
            scores = (spread_text(group["scores"].get(label), metric) for group in groups)
            mean = spread_text(at["mean"].get(label), metric)
            rows.append([plain(label), *middle, *scores, mean, count_or_nothing(at["wins"][label])])
        rows.append([words.best, *middle, *map(best_text, groups), "", ""])
    return headers, rows


def count_or_nothing(count: int | None) -> str:
    """Wins; a method that was not measured has lost nothing."""
    return NOTHING if count is None else str(count)


def best_text(group: Mapping[str, Any]) -> str:
    if group["best"]:
        return plain(group["best"])
    return f"tie of {len(group['tied'])}" if group["tied"] else NOTHING


def win_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for every pool, setup, budget, metric, group and method: compare-wins.csv.

    The metrics are the headline and all by which wins are counted; best and tied are of the group, in all its rows.
    """
    return [
        {
            "pool": one["pool"],
            "setup": one["setup"],
            "by": one["by"],
            "group": name,
            "budget": budget,
            "method": label,
            "run": at["runs"][label],
            **{key: (score or {}).get(key) for key in ("mean", "sd", "population_sd", "n")},
            "best": group["best"] == label,
            "tied": label in group["tied"],
            "clients": group["clients"],
            "examples": group["examples"],
            "metric": metric,
        }
        for one in results["wins"]
        for budget, at in one["at"].items()
        for metric, scored in {results["metric"]: at, **at.get("other_metrics", {})}.items()
        for name, group in at["groups"].items()
        for label, score in scored["groups"][name]["scores"].items()
    ]


def budget_name(name: str) -> str:
    """
    >>> budget_name("r16")
    'r 16'
    """
    return f"{name[0]} {name[1:]}" if name else ""
