"""Group runs by method over budgets, and by comparable setting."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.config.experiment import to_dict
from befit.core.text import dotted
from befit.protocol.registry import check_method
from befit.report.comparison import run_title
from befit.runs.groups import Rows, at_budgets, measured_budgets
from befit.studies.compare.collect import FinishedRun, Scores

_SIZE = ("rank", "alpha", "budgets")  # options in which a method at one budget may differ from itself at another
_SAME = ("benchmark", "data", "model", "families", "limit", "stream")  # settings that runs must share to be comparable
_Members = list[tuple[FinishedRun, dict[str, Any], str]]  # a run, its shared settings, and the others as text
_BUDGET = re.compile(r"[\s,·(]*\b(?:r|rank)[ =]*\d+\b(?:(?:, | and )(?:\d+|more)\b)*\)?", re.IGNORECASE)


@dataclass(frozen=True)
class Series:
    """One method: runs that differ only in their rank, or a run with several budgets. `label` is a run's, without its
    rank."""

    label: str
    runs: tuple[FinishedRun, ...]

    def at(self, budget: str, who: str) -> tuple[str, dict[int, Rows]] | None:
        """The run that has this budget, and the rows of its seeds; the budget "" stands for the deployed adapter."""
        for run in self.runs:
            by_seed = {cell.seed: rows for cell in run.cells if (rows := rows_by_budget(cell, run, who).get(budget))}
            if by_seed:
                return run.run.label, by_seed
        return None


@dataclass(frozen=True)
class Setup:
    """Series with the same data, model and base. `title` names these where there are several setups."""

    title: str
    series: tuple[Series, ...]


def setups_of(runs: Sequence[FinishedRun]) -> tuple[list[Setup], list[str]]:
    """All runs that have results, by setup and series; and the budgets: "r2", "r4", …, or "" where no run has any.

    A comparison has budgets where a run measured several, or where runs differ in nothing but their rank.
    """
    shared: dict[str, _Members] = {}
    for run in runs:
        if run.cells:
            setting, rest = _apart(run)
            name = setting.get("base", {}).get("name")
            shared.setdefault(_text({**setting, "base": name}), []).append((run, setting, _text(rest)))
    settings: list[dict[str, Any]] = []
    groups: list[list[list[FinishedRun]]] = []
    for members in (part for members_of_setting in shared.values() for part in _by_base(members_of_setting)):
        alike: dict[str, list[FinishedRun]] = {}
        for run, _, rest in members:
            alike.setdefault(rest, []).append(run)
        settings.append(members[0][1])
        groups.append([group for runs_alike in alike.values() for group in _series(runs_alike)])
    named = {name for series in groups for group in series if len(group) > 1 for run in group for name in _budgets(run)}
    named |= {name for run in runs for cell in run.cells for name in measured_budgets(cell.rows, cell.metric)}
    budgets = sorted(named, key=lambda name: int(name[1:])) or [""]
    titles = _titles(settings)
    return [Setup(title, _labelled(series, budgets)) for title, series in zip(titles, groups, strict=True)], budgets


def _by_base(members: _Members) -> list[_Members]:
    """Divide runs whose bases have one name by the base's settings, if any method occurs with several of these.

    Otherwise the settings belong to the method, such as the share of a larger `train.lr` that the base learns at.
    """
    bases: dict[str, set[str]] = {}
    for _, setting, rest in members:
        bases.setdefault(rest, set()).add(_text(setting.get("base")))
    if all(len(settings) == 1 for settings in bases.values()):
        return [members]
    parts: dict[str, _Members] = {}
    for member in members:
        parts.setdefault(_text(member[1].get("base")), []).append(member)
    return list(parts.values())


def who_was_measured(runs: Sequence[FinishedRun]) -> list[str]:
    """Who was measured: clients, and newcomers where there are any."""
    newcomers = any(cell.newcomers for run in runs for cell in run.cells)
    return ["clients", *["newcomers"] * newcomers]


def rows_by_budget(cell: Scores, run: FinishedRun, who: str) -> dict[str, Rows]:
    """The rows of clients or newcomers: as deployed under "", and at each budget, "r2", "r4", …"""
    rows = cell.rows if who == "clients" else cell.newcomers
    return {"": rows, **at_budgets(rows, _rank(run), metrics_of(cell, run))}


def metrics_of(cell: Scores, run: FinishedRun) -> list[str]:
    """What was measured, the headline first."""
    return list(dict.fromkeys([cell.metric, *(run.run.cells[0].experiment.evaluate.metrics or ())]))


def _budgets(run: FinishedRun) -> list[str]:
    return list(dict.fromkeys(name for cell in run.cells for name in rows_by_budget(cell, run, "clients") if name))


def _rank(run: FinishedRun) -> int | None:
    return run.run.cells[0].experiment.method.get("rank")


def _apart(run: FinishedRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that comparable runs share, and the rest of the configuration without name and budget."""
    config = copy.deepcopy(to_dict(run.run.cells[0].experiment))
    config.pop("name")
    method = config["method"]
    setting = {key: config.pop(key) for key in _SAME if key in config}
    if isinstance(base := method.get("base"), Mapping) and "name" in base:
        setting["base"] = check_method(method.pop("base"), "base")[0]  # with its defaults
    for key in _SIZE:
        method.pop(key, None)
    return setting, config


def _series(runs: list[FinishedRun]) -> list[list[FinishedRun]]:
    """The runs as one series, or each as its own where two of them have one budget."""
    budgets = [name for run in runs for name in _budgets(run)]
    apart = len(set(budgets)) < len(budgets) or any(not _budgets(run) for run in runs)
    return [[run] for run in runs] if apart else [runs]


def _labelled(groups: Sequence[list[FinishedRun]], budgets: Sequence[str]) -> tuple[Series, ...]:
    labels = [_BUDGET.sub("", runs[0].run.label).strip(" ,·") if budgets != [""] else "" for runs in groups]
    return tuple(
        Series(label if label and labels.count(label) == 1 else runs[0].run.label, tuple(runs))
        for label, runs in zip(labels, groups, strict=True)
    )


def _titles(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each setup its base, and every setting that differs between setups."""
    flat = [dotted(setting) for setting in settings]
    differing = _differing(flat)
    based = any(key.startswith("base.") for key in differing)
    titles = []
    for setting in flat:
        name = setting.get("base.name")
        alike = _differing([other for other in flat if other.get("base.name") == name])
        parts = [f"on {run_title(str(name))}" if name else "without a base"] if based else []
        parts += [
            f"{key}={setting[key]}"
            for key in differing
            if key in setting and (not key.startswith("base.") or key in alike)
        ]
        titles.append(", ".join(parts))
    return titles


def _differing(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for setting in flat for key in setting)
    return [key for key in keys if len({_text(setting.get(key)) for setting in flat}) > 1]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
