"""Scores beside a run's mean: over time, on other clients' examples, and of newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from befit.report.newcomers import newcomers_of
from befit.report.numbers import NOTHING, plain, score_of, spread_text
from befit.report.table import Table
from befit.report.tables import OVER_TIME
from befit.report.words import OVER_TIME_NOTE
from befit.studies.compare.texts import difference_text, p_text

__all__ = ["COMPARED", "GROUPS", "Group", "beside_tables", "scores_beside"]


@dataclass(frozen=True)
class Group:
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
    Group("Own and other clients' examples", OVER_TIME, "others_last", OVER_TIME_NOTE),
    Group(
        "Newcomers",
        NEWCOMERS,
        "newcomers",
        "Clients that took part in no round. As downloaded: what the method makes of the server's last download alone; "
        "at the end: after its personal stages on a newcomer's own examples. Worst newcomer: the lowest of each seed.",
    ),
)
COMPARED = tuple(group.compared for group in GROUPS)
_TEST_NOTE = (
    "Mean ± SD over seeds. The difference is paired by seed, with half its 95 % t interval; p is Holm's for the runs "
    "of this table."
)


def scores_beside(results: Mapping[str, Any]) -> dict[str, float]:
    """Of a run's results.json, whatever of these scores is there."""
    found: dict[str, float | None] = {
        key: score_of(results["summary"].get("over_time") or {}, key) for key in OVER_TIME
    }
    if found["others_last"] is None:  # own examples alone are the comparison's main table
        found = {}
    if view := newcomers_of(results):
        summary = view["summary"]
        found |= {
            "newcomers_backbone": score_of(summary.get("backbone") or {}, "mean"),
            "newcomers_download": score_of(summary.get("download") or {}, "mean"),
            "newcomers": score_of(summary, "mean"),
            "newcomers_worst": score_of(summary.get("worst") or {}, "value"),
        }
    return {key: value for key, value in found.items() if value is not None}


def beside_tables(results: Mapping[str, Any]) -> list[Table]:
    """A table for each group that some run was scored in."""
    made = [Table(group.title, *_table(results, group), f"{group.note} {_TEST_NOTE}") for group in GROUPS]
    return [one for one in made if one]


def _table(results: Mapping[str, Any], group: Group) -> tuple[list[str], list[list[str]]]:
    metric, runs = results["metric"], results["runs"]
    present = [key for key in group.columns if any(key in run["beside"] for run in runs)]
    if group.compared not in present:
        return [], []
    if all(run["beside"].get("others_auc") == run["beside"].get("others_last") for run in runs):
        present = [key for key in present if key != "others_auc"]  # measured once, so that there is no time to speak of
    several = len(runs) > 1
    headers = ["run", *(group.columns[key] for key in present)]
    headers += [f"{group.columns[group.compared]}: minus {plain(results['reference'])} ± 95%", "p (t, seeds)"] * several
    rows = []
    for run in runs:
        t = run["beside_against"].get(group.compared)
        rows.append(
            [
                plain(run["label"]),
                *(spread_text(run["beside"].get(key), metric) for key in present),
                *([difference_text(t, metric), p_text(t["p_holm"])] if t else [NOTHING, NOTHING]) * several,
            ]
        )
    return headers, rows
