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
    "clients. The best is who is strictly ahead, however little, in more than half of the metrics that count; a tie is "
    "nobody's. It is a count, and no statement that a difference is more than chance."
)


def group_tables(results: Mapping[str, Any], who: str = "clients") -> list[tuple[str, Table, str]]:
    """One table for each thing that is known of clients: (what, table, wins in words). `results` may be the
    view of newcomers, `who` then says so."""
    found = []
    whose = " of newcomers" if who == "newcomers" else ""
    for key, one in (results.get("groups") or {}).items():
        what = f"{plain(key)}{' of the examples' * (one.get('of') == 'examples')}{whose}"
        found.append(_group_table(results, key, what, one, who))
        for budget, there in (one.get("budgets") or {}).items():
            found.append(_group_table(results, key, f"{what}, budget r = {budget[1:]}", there, who))
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
        known = _measured(one)
        rows.append(["wins", "", "", *(str(one["wins"][label]) if known[label] else NOTHING for label in labels), ""])
    return title, (headers, rows), wins_text(one) if compared else ""


def wins_text(one: Mapping[str, Any]) -> str:
    """Who is best how often, among the runs that were measured: one without a score has lost nothing.

    >>> both, alone = {"local": {"m": 0.1}, "fedit": {"m": 0.2}}, {"local": {"m": 0.1}, "fedit": {"m": None}}
    >>> wins_text({"wins": {"local": 0, "fedit": 1}, "groups": {"a": {"scores": both}, "b": {"scores": alone}}})
    'Best in 1 group: FedIT in 1 (measured in 1), Local in 0. 1 group with fewer than two measured runs is left out.'
    """
    known, total = _measured(one), len(one["groups"])
    wins = sorted(((label, count) for label, count in one["wins"].items() if known[label]), key=lambda item: -item[1])
    parts = [
        f"{run_title(label)} in {count}" + (f" (measured in {known[label]})" if known[label] < total else "")
        for label, count in wins
    ]
    compared = sum(len(_scored(group)) > 1 for group in one["groups"].values())
    nobody = compared - sum(one["wins"].values())
    parts += [f"nobody in {nobody}"] if nobody else []
    said = [f"Best in {count_text(compared, 'group')}: {', '.join(parts)}."] if compared else []
    if left := total - compared:
        verb = "is" if left == 1 else "are"
        said.append(f"{count_text(left, 'group')} with fewer than two measured runs {verb} left out.")
    if missing := [run_title(label) for label, count in known.items() if not count]:
        said.append(f"Not measured here: {', '.join(missing)}.")
    return " ".join(said)


def _measured(one: Mapping[str, Any]) -> dict[str, int]:
    """In how many groups each run has a score."""
    return {label: sum(label in _scored(group) for group in one["groups"].values()) for label in one["wins"]}


def _scored(group: Mapping[str, Any]) -> list[str]:
    """The runs that have a score in a group."""
    return [label for label, one in group["scores"].items() if any(value is not None for value in one.values())]
