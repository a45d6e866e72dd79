"""Budgets and wins as tables: how often each method is best, and the scores that it is read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from befit.report.numbers import listing
from befit.report.table import Table, mean_cell
from befit.studies.compare.results import AtBudget, Comparison, GroupScores, Wins

FEW_GROUPS, MANY_METHODS = 8, 8  # more methods than these in no more groups: groups are the columns
WINS_NOTE = (
    "The best method in a group has strictly the highest score, over all of the group's test examples and as the mean "
    "over seeds, however small the lead; a tie counts for no method. Counts do not test whether a lead is chance."
)
GROUPS_NOTE = (
    "Papers that divide by n print sqrt((n - 1) / n) of the SD. A group's score is over all of its test examples; the "
    "best of a group is in bold."
)
ALONE_NOTE = "Ahead: strictly best in this metric alone."


@dataclass(frozen=True)
class Words:
    """Headings of a table of groups: the best method of a group, and the number of groups that a method leads."""

    best: str
    wins: str


OVERALL, IN_ONE_METRIC = Words("best", "wins"), Words("ahead", "ahead")


def budget_tables(results: Comparison, basis: str = "") -> list[Table]:
    """The mean over clients of every method at every budget, clients and newcomers apart.

    basis  what the numbers are, as `tables.basis_note` says it
    """
    tables = []
    for entry in results["budgets"]:
        based = any(row["setup"] for row in entry["rows"])
        headers = ["method", *["setup"] * based, *map(budget_name, entry["budgets"])]
        rows = [
            [
                row["method"],
                *[row["setup"]] * based,
                *(mean_cell(row["scores"].get(name), results["metric"]) for name in entry["budgets"]),
            ]
            for row in entry["rows"]
        ]
        note = f"{basis} Mean over {entry['pool']}. A budget is a run's rank, or one of those that it measured."
        tables.append(Table("Budgets" + _newcomers(entry["pool"]), headers, rows, note.strip()))
    return tables


def wins_tables(results: Comparison, basis: str = "") -> list[Table]:
    """How often each method is best, for clients, newcomers and properties of theirs; then all groups, as details."""
    counted: dict[tuple[str, str], list[Wins]] = {}
    for entry in results["wins"]:
        counted.setdefault((entry["pool"], _by(entry)), []).append(entry)
    tables = [_count_table(results["metric"], by, entries) for (_, by), entries in counted.items()]
    for entry in results["wins"]:
        note = f"{basis} {GROUPS_NOTE}".strip()
        ahead = _ahead_note(results["metric"], entry)
        tables.append(_group_table(results["metric"], entry, note + ahead, OVERALL))
        tables += [
            _group_table(metric, alone, f"{note} {ALONE_NOTE}", IN_ONE_METRIC, metric)
            for metric, alone in _each_alone(entry)
        ]
    return tables


def _each_alone(entry: Wins) -> Iterator[tuple[str, Wins]]:
    """Every metric beside the headline that counts, and the entry with the scores and the wins of it alone."""
    others = dict.fromkeys(metric for at in entry["at"].values() for metric in at.get("other_metrics", ()))
    for metric in others:
        at = {name: {**at, **at.get("other_metrics", {})[metric]} for name, at in entry["at"].items()}
        yield metric, cast(Wins, {**entry, "at": at})


def _count_table(metric: str, by: str, entries: Sequence[Wins]) -> Table:
    based, budgets = any(entry["setup"] for entry in entries), entries[0]["budgets"]
    names = [budget_name(name) or "wins" for name in budgets]
    rows = []
    for entry in entries:
        lines = {label: [entry["at"][name]["wins"].get(label) for name in budgets] for label in entry["methods"]}
        lines["nobody"] = [entry["at"][name]["nobody"] for name in budgets]
        for label, counts in lines.items():
            known = [count for count in counts if count is not None]
            total = [sum(known) if known else None] * (len(budgets) > 1)
            rows.append([label, *[entry["setup"]] * based, *counts, *total])
    seeds = {tuple(at["seeds"]) for entry in entries for at in entry["at"].values() if at["groups"]}
    note = f"{WINS_NOTE}{_ahead_note(metric, entries[0])}"
    if len(seeds) > 1:
        note += " Not all rows are of the same seeds: only those count that all methods of a row have."
    if left_out := sorted({name for entry in entries for at in entry["at"].values() for name in at["left_out"]}):
        note += f" Left out, since not every seed has them: {listing(left_out)}."
    headers = ["method", *["setup"] * based, *names, *["all"] * (len(budgets) > 1)]
    return Table(f"Wins by {by}{_newcomers(entries[0]['pool'])}", headers, rows, note)


def _by(entry: Wins) -> str:
    """The property that divides clients, or their examples, into groups."""
    return entry["by"] + " of the examples" * (entry["of"] == "examples")


def _newcomers(who: str) -> str:
    return ", newcomers" * (who == "newcomers")


def _ahead_note(headline: str, entry: Wins) -> str:
    """The metrics that decide who is best, where it is not the headline alone."""
    metrics = entry["metrics"]
    if metrics == [headline]:
        return ""
    return f" Ahead in {'more than half of ' * (len(metrics) > 1)}{listing(metrics)}."


def _group_table(metric: str, entry: Wins, note: str, words: Words, name: str = "") -> Table:
    """Every group's scores in one metric at every budget, who is best, and the mean over groups."""
    parts = [f"Scores by {_by(entry)}", entry["setup"], "newcomers" * (entry["pool"] == "newcomers"), name]
    groups = max(len(at["groups"]) for at in entry["at"].values())
    turned = len(entry["methods"]) > MANY_METHODS and groups <= FEW_GROUPS
    headers, rows = (_methods_as_rows if turned else _methods_as_columns)(metric, entry, words)
    return Table(", ".join(filter(None, parts)), headers, rows, note, detail=True)


def _methods_as_columns(metric: str, entry: Wins, words: Words) -> tuple[list[str], list[list[Any]]]:
    """The rows of a budget stand together and end with the mean over groups and how many a method is best in."""
    methods, budgeted = entry["methods"], entry["budgets"] != [""]
    rows: list[list[Any]] = []
    for budget, at in entry["at"].items():
        start = [budget_name(budget)] * budgeted
        for name, group in at["groups"].items():
            scores = (mean_cell(group["scores"].get(label), metric, label == group["best"]) for label in methods)
            rows.append([*start, name, group["examples"], *scores, _best_text(group)])
        if at["groups"]:
            rows.append([*start, "mean", "", *(mean_cell(at["mean"].get(label), metric) for label in methods), ""])
            rows.append([*start, words.wins, "", *(at["wins"].get(label) for label in methods), ""])
    return [*["budget"] * budgeted, entry["by"], "test examples", *methods, words.best], rows


def _methods_as_rows(metric: str, entry: Wins, words: Words) -> tuple[list[str], list[list[Any]]]:
    """The last row of a budget says who is best in each group."""
    budgeted = entry["budgets"] != [""]
    names = list(dict.fromkeys(name for at in entry["at"].values() for name in at["groups"]))
    rows: list[list[Any]] = []
    for budget, at in entry["at"].items():
        middle = [budget_name(budget)] * budgeted
        groups = [at["groups"].get(name, _NO_GROUP) for name in names]
        for label in (label for label in entry["methods"] if label in at["wins"]):
            scores = (mean_cell(group["scores"].get(label), metric, label == group["best"]) for group in groups)
            rows.append([label, *middle, *scores, mean_cell(at["mean"].get(label), metric), at["wins"][label]])
        rows.append([words.best, *middle, *map(_best_text, groups), "", ""])
    return ["method", *["budget"] * budgeted, *names, "mean", words.wins], rows


_NO_GROUP: GroupScores = {"clients": 0, "examples": 0, "scores": {}, "best": None, "tied": []}


def _best_text(group: GroupScores) -> str | None:
    return group["best"] or (f"tie of {len(group['tied'])}" if group["tied"] else None)


def win_rows(results: Comparison) -> list[dict[str, Any]]:
    """One row for clients or newcomers (`pool`) and every setup, budget, metric, group and method: compare-wins.csv.

    The metrics are the headline and all by which wins are counted; best and tied are of the group, in all its rows.
    """
    return [
        {
            "pool": entry["pool"],
            "setup": entry["setup"],
            "by": entry["by"],
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
        for entry in results["wins"]
        for budget, at in entry["at"].items()
        for metric, scored in _metrics_of(results["metric"], at)
        for name, group in at["groups"].items()
        for label, score in scored["groups"][name]["scores"].items()
    ]


def _metrics_of(headline: str, at: AtBudget) -> list[tuple[str, Any]]:
    return [(headline, at), *at.get("other_metrics", {}).items()]


def budget_name(name: str) -> str:
    """
    >>> budget_name("r16")
    'r 16'
    """
    return f"{name[0]} {name[1:]}" if name else ""
