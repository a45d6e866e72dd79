"""Scores by language, task or another property of clients, and how often each run wins."""

from __future__ import annotations

from befit.report.comparison import run_title
from befit.report.numbers import count_text, score_of
from befit.report.results import Group, Grouped, RunResults
from befit.report.table import Cell, Table, score

GROUP_NOTE = (
    "A group's score is over all of its test examples, so clients with more of them count more than in the mean over "
    "clients. The best run is strictly ahead, however little, in most of the metrics that count; a tie counts "
    "for no run. Counts do not test whether a lead is chance."
)


def group_tables(results: RunResults, who: str = "clients") -> list[Table]:
    """One table for each property of clients, with the wins in words; for the view of newcomers `who` says so."""
    tables = []
    whose = " of newcomers" if who == "newcomers" else ""
    for key, grouped in (results.get("groups") or {}).items():
        title = f"{key}{' of the examples' * (grouped.get('of') == 'examples')}{whose}"
        title = title[:1].upper() + title[1:]
        tables.append(_group_table(results["metric"], key, title, grouped, who))
        for budget, at_budget in (grouped.get("budgets") or {}).items():
            tables.append(_group_table(results["metric"], key, f"{title}, budget r = {budget[1:]}", at_budget, who))
    return tables


def _group_table(metric: str, key: str, title: str, grouped: Grouped, who: str) -> Table:
    labels = list(grouped["wins"])
    compared = len(labels) > 1
    rows = [
        [
            name,
            group["clients"],
            group["examples"],
            *(Cell(score_of(group["scores"][label], metric), score(metric)) for label in labels),
            *[run_title(group["winner"]) if group["winner"] else None] * compared,
        ]
        for name, group in grouped["groups"].items()
    ]
    if compared:
        counts = _measured(grouped)
        rows.append(["wins", "", "", *(grouped["wins"][label] if counts[label] else None for label in labels), ""])
    headers = [key, who, "examples", *map(run_title, labels), *["best"] * compared]
    return Table(title, headers, rows, wins_text(grouped) if compared else "")


def wins_text(grouped: Grouped) -> str:
    """How often each run is best, among those with a score in the group: a run without one does not lose there.

    >>> both, alone = {"local": {"m": 0.1}, "fedit": {"m": 0.2}}, {"local": {"m": 0.1}, "fedit": {"m": None}}
    >>> wins_text({"wins": {"local": 0, "fedit": 1}, "groups": {"a": {"scores": both}, "b": {"scores": alone}}})
    'Best in 1 group: FedIT in 1 (measured in 1), Local in 0. 1 group with fewer than two measured runs is left out.'
    """
    counts, total = _measured(grouped), len(grouped["groups"])
    wins = sorted(((label, won) for label, won in grouped["wins"].items() if counts[label]), key=lambda item: -item[1])
    parts = [
        f"{run_title(label)} in {won}" + (f" (measured in {counts[label]})" if counts[label] < total else "")
        for label, won in wins
    ]
    compared = sum(len(_scored(group)) > 1 for group in grouped["groups"].values())
    nobody = compared - sum(grouped["wins"].values())
    parts += [f"nobody in {nobody}"] if nobody else []
    sentences = [f"Best in {count_text(compared, 'group')}: {', '.join(parts)}."] if compared else []
    if left := total - compared:
        verb = "is" if left == 1 else "are"
        sentences.append(f"{count_text(left, 'group')} with fewer than two measured runs {verb} left out.")
    if missing := [run_title(label) for label, count in counts.items() if not count]:
        sentences.append(f"Not measured here: {', '.join(missing)}.")
    return " ".join(sentences)


def _measured(grouped: Grouped) -> dict[str, int]:
    """In how many groups each run has a score."""
    return {label: sum(label in _scored(group) for group in grouped["groups"].values()) for label in grouped["wins"]}


def _scored(group: Group) -> list[str]:
    """The runs that have a score in a group."""
    return [label for label, scores in group["scores"].items() if any(value is not None for value in scores.values())]
