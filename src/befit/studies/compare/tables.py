"""The tables of a comparison as plain text cells: the one place where its numbers are formatted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.report.numbers import NOTHING, bytes_text, gain_text, plain, score_text, seconds_text, spread_text
from befit.report.table import Table
from befit.studies.compare.beside import beside_tables
from befit.studies.compare.other_metrics import other_tables
from befit.studies.compare.statistics import LEAST_PAIRS, LEVEL
from befit.studies.compare.summary import verdict
from befit.studies.compare.texts import difference_text, p_text
from befit.studies.compare.wins_tables import budget_tables, wins_tables

__all__ = [
    "all_tables",
    "client_table",
    "cost_table",
    "difference_table",
    "grid_table",
    "screen_tables",
    "summary_table",
]

COST_NOTE = (
    "Means over seeds; bytes of training as encoded for the wire, all clients together (1 MB = 1e6 bytes); steps are "
    "mini-batches of one client over all stages."
)
WIDE = 8  # clients are in columns where they are no more than this, and runs are more


def screen_tables(results: Mapping[str, Any]) -> list[Table]:
    """What the terminal shows: all but the per-client table, which is wide."""
    return [one for one in all_tables(results) if not one.detail]


def all_tables(results: Mapping[str, Any]) -> list[Table]:
    """Grids first, in the paper's form, and who wins at which budget, then every run and what was scored beside it."""
    made = [Table(one["title"], *grid_table(results, one), grid_note(results, one)) for one in results["tables"]]
    wins = wins_tables(results)
    made += [*budget_tables(results), *(one for one in wins if not one.detail)]
    made.append(Table("All runs", *summary_table(results), summary_note(results)))
    if len(results["runs"]) > 1:
        made.append(
            Table(
                f"Differences from {plain(results['reference'])}", *difference_table(results), difference_note(results)
            )
        )
    made += [*other_tables(results), *beside_tables(results)]
    made.append(Table("Cost", *cost_table(results), COST_NOTE))
    made += [one for one in wins if one.detail]
    made.append(Table("Clients", *client_table(results), client_note(results), detail=True))
    return made


def grid_table(results: Mapping[str, Any], grid: Mapping[str, Any]) -> Any:
    """Mean ± SD over seeds in every cell, and the paper's number in brackets where there is one."""
    by_label = {run["label"]: run for run in results["runs"]}
    headers = [plain(grid["corner"]), *(plain(", ".join(one)) for one in grid["columns"])]
    rows = []
    for i, row in enumerate(grid["rows"]):
        cells = []
        for j in range(len(grid["columns"])):
            label, paper = grid["runs"][i][j], grid["paper"][i][j]
            text = NOTHING if label is None else spread_text(by_label[label]["mean"], results["metric"])
            cells.append(text if paper is None else f"{text} [{paper:.2f}]")
        rows.append([plain(", ".join(row)), *cells])
    return headers, rows


def grid_note(results: Mapping[str, Any], grid: Mapping[str, Any]) -> str:
    parts = [grid["note"]] if grid["note"] else []
    if any(number is not None for row in grid["paper"] for number in row):
        parts.append(f"In brackets: the paper's numbers. {results['note']}".strip())
    reasons: dict[str, list[str]] = {}
    for i, row in enumerate(grid["reasons"]):
        for j, reason in enumerate(row):
            if reason:
                reasons.setdefault(reason, []).append(f"{', '.join(grid['rows'][i])} / {', '.join(grid['columns'][j])}")
    parts += [f"Left out: {'; '.join(cells)}: {reason}." for reason, cells in reasons.items()]
    return plain(" ".join(parts))


def summary_table(results: Mapping[str, Any]) -> Any:
    """Per run: mean over seeds of the mean over clients, its SD, the worst client, wins, and the paper's number.

    How many seeds a run has is shown where any lacks one.
    """
    metric, runs = results["metric"], results["runs"]
    several = len(runs) > 1
    papers = any(run["paper"] is not None for run in runs)
    partly = any(len(run["seeds"]) < len(results["seeds"]) for run in runs)
    headers = ["run", f"mean {plain(metric).replace('_', ' ')}", "SD over seeds", "worst client", *["seeds"] * partly]
    headers += ["clients better / same / worse"] * several + ["up", "down"] + ["paper"] * papers
    rows = []
    for run in runs:
        mean, signed = run["mean"] or {}, (run["against"] or {}).get("signed")
        rows.append(
            [
                plain(run["label"]),
                score_text(mean.get("mean"), metric),
                gain_text(mean.get("sd"), metric, signed=False),
                score_text((run["worst"] or {}).get("mean"), metric),
                *[str(len(run["seeds"]))] * partly,
                *[f"{signed['better']}/{signed['ties']}/{signed['worse']}" if signed else NOTHING] * several,
                bytes_text(run["bytes_up"]),
                bytes_text(run["bytes_down"]),
                *[NOTHING if run["paper"] is None else f"{run['paper']:.2f}"] * papers,
            ]
        )
    return headers, rows


def summary_note(results: Mapping[str, Any]) -> str:
    text = (
        f"Mean over seeds of the mean over clients, on {results['split']} examples; SD with n - 1. Worst client: the "
        "lowest of each seed, mean over seeds."
    )
    if len(results["runs"]) > 1:
        text += f" Better, same and worse than {results['reference']}: clients of all seeds together."
    if any(run["paper"] is not None for run in results["runs"]):
        text += f" Paper: {results['paper']}{', ' + results['table'] if results['table'] else ''}. {results['note']}"
    return plain(text.strip())


def difference_table(results: Mapping[str, Any]) -> Any:
    """Per run: mean difference from the reference with half its interval, both tests, and what follows."""
    metric = results["metric"]
    headers = ["run", "difference ± 95%", "p (t, seeds)", "p (Wilcoxon, clients)", "what follows"]
    rows = []
    for run in results["runs"]:
        if run["label"] == results["reference"]:
            continue
        if run["against"] is None:
            rows.append([plain(run["label"]), *[NOTHING] * 3, _unpaired(results, run)])
            continue
        t, signed = run["against"]["t"], run["against"]["signed"]
        texts = difference_text(t, metric), p_text(t["p_holm"]), p_text(signed["p_holm"])
        rows.append([plain(run["label"]), *texts, verdict(run["against"])])
    return headers, rows


def _unpaired(results: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    reference = next(one for one in results["runs"] if one["label"] == results["reference"])
    for one in (reference, run):
        if not one["seeds"]:
            return f"{plain(one['label'])} has no results"
    return verdict(None)


def difference_note(results: Mapping[str, Any]) -> str:
    compared = [run["against"] for run in results["runs"] if run["against"]]
    counts = {key: sum(one[key]["p"] is not None for one in compared) for key in ("t", "signed")}
    n = max((one["t"]["n"] for one in compared), default=0)
    return (
        f"p (t, seeds): paired t test of the seeds' means over clients, n = {n}; what follows is taken from it at "
        f"{LEVEL}. p (Wilcoxon, clients): signed ranks over clients x seeds, not done below {LEAST_PAIRS} that differ; "
        "clients of one seed share a model, so it takes them for more evidence than they are. Both are adjusted for "
        f"the number of runs compared (Holm; {counts['t']} and {counts['signed']}); the interval is not."
    )


def cost_table(results: Mapping[str, Any]) -> Any:
    headers = ["run", "steps per client", "up", "down", "client time"]
    rows = [
        [
            plain(run["label"]),
            NOTHING if run["steps"] is None else f"{run['steps']:.0f}",
            bytes_text(run["bytes_up"]),
            bytes_text(run["bytes_down"]),
            seconds_text(run["seconds"]),
        ]
        for run in results["runs"]
    ]
    return headers, rows


def client_table(results: Mapping[str, Any]) -> Any:
    """Every client's mean ± SD over seeds, clients in rows, or in columns where they are few and runs are many."""
    runs, metric = results["runs"], results["metric"]
    clients = clients_of(results)
    if len(runs) > WIDE >= len(clients):
        return ["run", *map(plain, clients)], [
            [plain(run["label"]), *(spread_text(run["clients"].get(one), metric) for one in clients)] for run in runs
        ]
    return ["client", *(plain(run["label"]) for run in runs)], [
        [plain(one), *(spread_text(run["clients"].get(one), metric) for run in runs)] for one in clients
    ]


def client_note(results: Mapping[str, Any]) -> str:
    data = {cell["seed"]: cell["data"] for run in results["runs"] for cell in run["seeds"]}
    if len(set(data.values())) > 1:
        return "Mean ± SD over seeds. Each seed divides the data anew: a client of one name has other examples in each."
    return "Mean ± SD over seeds."


def clients_of(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(client for run in results["runs"] for client in run["clients"]))
