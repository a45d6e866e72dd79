"""Scores by language, task or whatever else is known of clients, and who wins how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.report.comparison import run_title
from befit.report.numbers import NOTHING, count_text, plain, score_of, score_text
from befit.report.tables import Table

__all__ = ["GROUP_NOTE", "group_tables", "wins_text"]

GROUP_NOTE = (
    "A group's score is over all of its test examples, so clients with more of them count more than in the mean over "
    "clients. The best is who is strictly ahead, however little, in more than half of the metrics; a tie is nobody's. "
    "It is a count, and no statement that a difference is more than chance."
)


def group_tables(results: Mapping[str, Any], who: str = "clients") -> list[tuple[str, Table, str]]:
    """One table for each thing that is known of clients: (what, table, wins in words). `results` may be the
    view of newcomers, `who` then says so."""
    found = []
    whose = " of newcomers" if who == "newcomers" else ""
    for key, one in (results.get("groups") or {}).items():
        found.append(_group_table(results, key, f"{plain(key)}{whose}", one, who))
        for budget, there in (one.get("budgets") or {}).items():
            found.append(_group_table(results, key, f"{plain(key)}{whose}, budget r = {budget[1:]}", there, who))
    return found


def _group_table(
    results: Mapping[str, Any], key: str, title: str, one: Mapping[str, Any], who: str
) -> tuple[str, Table, str]:
    metric, labels = results["metric"], list(one["wins"])
    compared = len(labels) > 1
    headers = [plain(key), who, "test examples", *map(run_title, labels), *["best"] * compared]
    rows = [
        [
            plain(name),
            str(group["clients"]),
            str(group["examples"]),
            *(score_text(score_of(group["scores"][label], metric), metric) for label in labels),
            *[run_title(group["winner"]) if group["winner"] else NOTHING] * compared,
        ]
        for name, group in one["groups"].items()
    ]
    if compared:
        rows.append(["wins", "", "", *(str(one["wins"][label]) for label in labels), ""])
    return title, (headers, rows), wins_text(one) if compared else ""


def wins_text(one: Mapping[str, Any]) -> str:
    """
    >>> wins_text({"wins": {"local": 1, "fedit": 2}, "groups": {"a": 0, "b": 0, "c": 0, "d": 0}})
    'Best in 4 groups: FedIT in 2, Local in 1, nobody in 1.'
    """
    wins = sorted(one["wins"].items(), key=lambda item: -item[1])
    parts = [f"{run_title(label)} in {count}" for label, count in wins]
    nobody = len(one["groups"]) - sum(one["wins"].values())
    parts += [f"nobody in {nobody}"] if nobody else []
    return f"Best in {count_text(len(one['groups']), 'group')}: {', '.join(parts)}."
