"""Scores beside a run's mean: over time, on other clients' examples, and of newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from befit.report.numbers import score_of
from befit.report.results import RunResults, newcomers_of
from befit.report.tables import OVER_TIME
from befit.report.words import OVER_TIME_NOTE


@dataclass(frozen=True)
class ScoresTable:
    """One table: its columns by key, and the one whose differences from the reference are tested."""

    title: str
    columns: Mapping[str, str]
    compared: str
    note: str


NEWCOMERS = {
    "newcomers_backbone": "backbone",
    "newcomers_download": "as downloaded",
    "newcomers": "at the end",
    "newcomers_worst": "worst newcomer",
}
GROUPS = (
    ScoresTable("Own and other clients' examples", OVER_TIME, "others_last", OVER_TIME_NOTE),
    ScoresTable(
        "Newcomers",
        NEWCOMERS,
        "newcomers",
        "Clients that took part in no round. As downloaded: what the method makes of the server's last download alone; "
        "at the end: after its personal stages on a newcomer's own examples. Worst newcomer: the lowest of each seed.",
    ),
)
COMPARED = tuple(group.compared for group in GROUPS)


def scores_beside(results: RunResults) -> dict[str, float]:
    """Of a run's results.json, whatever of these scores is there."""
    scores: dict[str, float | None] = {
        key: score_of(results["summary"].get("over_time") or {}, key) for key in OVER_TIME
    }
    if scores["others_last"] is None:  # own examples alone are the comparison's main table
        scores = {}
    if view := newcomers_of(results):
        summary = view["summary"]
        scores |= {
            "newcomers_backbone": score_of(summary.get("backbone") or {}, "mean"),
            "newcomers_download": score_of(summary.get("download") or {}, "mean"),
            "newcomers": score_of(summary, "mean"),
            "newcomers_worst": score_of(summary.get("worst") or {}, "value"),
        }
    return {key: value for key, value in scores.items() if value is not None}
