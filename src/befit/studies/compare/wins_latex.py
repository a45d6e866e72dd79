"""The tables of wins for a paper: how often each method is best at each budget, and every group's scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.studies.compare.latex_parts import escape_latex, latex_line, latex_spread, latex_table, seeds_text, unit_text
from befit.studies.compare.wins_tables import OVERALL, Words, alone, budget_name, count_or_nothing

__all__ = ["latex_wins"]


def latex_wins(results: Mapping[str, Any]) -> list[str]:
    """One table of counts, and for each pool and setup one of scores in every metric; nothing without groups."""
    wins = results.get("wins", [])
    made = [_counts(wins)] if wins else []
    for number, one in enumerate(wins, 1):
        made.append(_scores(results, one, f"wins-{number}", OVERALL))
        made += [
            _scores({**results, "metric": metric}, only, f"wins-{number}-{metric}", words)
            for metric, only, words in alone(one)
        ]
    return made


def _counts(wins: Sequence[Mapping[str, Any]]) -> str:
    """Methods in rows, budgets in columns; a block for each pool and setup."""
    budgets = wins[0]["budgets"]
    headers = ["", *(budget_name(name) if name else "wins" for name in budgets)]
    body: list[str] = []
    for one in wins:
        body += [r"\midrule"] * bool(body)
        body.append(rf"\multicolumn{{{len(headers)}}}{{l}}{{\emph{{{escape_latex(_of(one))}}}}} \\")
        for label in one["methods"]:
            counts = (one["at"][name]["wins"].get(label) for name in budgets)
            body.append(latex_line([label, *map(count_or_nothing, counts)]))
        body.append(latex_line(["nobody", *(str(one["at"][name]["nobody"]) for name in budgets)]))
    caption = "Groups in which each method is strictly best in the mean over seeds; a tie is nobody's"
    return latex_table("l" + "r" * len(budgets), [latex_line(headers)], body, caption, "wins")


def _scores(results: Mapping[str, Any], one: Mapping[str, Any], name: str, words: Words) -> str:
    """Groups in rows, methods in columns, a block for each budget that ends with the mean; best of a group in bold."""
    headers = [one["by"], *one["methods"]]
    body: list[str] = []
    for budget, at in one["at"].items():
        body += [r"\midrule"] * bool(body)
        if budget:
            body.append(rf"\multicolumn{{{len(headers)}}}{{l}}{{\emph{{{escape_latex(budget_name(budget))}}}}} \\")
        for group_name, group in at["groups"].items():
            scores = (
                latex_spread(group["scores"].get(label), results["metric"], label == group["best"])
                for label in one["methods"]
            )
            body.append(" & ".join([escape_latex(group_name), *scores]) + r" \\")
        means = (latex_spread(at["mean"].get(label), results["metric"], False) for label in one["methods"])
        body.append(" & ".join(["mean", *means]) + r" \\")
        body.append(latex_line([words.wins, *(count_or_nothing(at["wins"].get(label)) for label in one["methods"])]))
    caption = f"{unit_text(results)} by {escape_latex(_of(one))}, {seeds_text(results)}, best in bold"
    return latex_table("l" + "c" * len(one["methods"]), [latex_line(headers)], body, caption, name)


def _of(one: Mapping[str, Any]) -> str:
    return ", ".join([one["by"], *[one["setup"]] * bool(one["setup"]), *["newcomers"] * (one["pool"] == "newcomers")])
