"""Every metric beside the headline: each client's number, means over clients, and their spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from befit.core.metrics import spread
from befit.report.numbers import score_of
from befit.runs.groups import Rows
from befit.studies.compare.collect import FinishedRun
from befit.studies.compare.results import Comparison, OtherMetrics, OtherRun, OtherSeed
from befit.studies.compare.series import metrics_of, who_was_measured

UNPARSABLE = "unparsable"  # measured with choice_parse, without being asked for


def other_metrics(runs: Sequence[FinishedRun]) -> list[OtherMetrics]:
    """One entry for clients and one for newcomers, each where metrics beside the headline were measured of them.

    The metrics are those of `evaluate.metrics` after the headline that some run has, then `unparsable`. A run's scores
    are means over seeds of the mean over clients.
    """
    cells = [(run, cell) for run in runs for cell in run.cells]
    wanted = dict.fromkeys(name for run, cell in cells for name in [*metrics_of(cell, run), UNPARSABLE])
    headlines = {cell.metric for _, cell in cells}
    entries: list[OtherMetrics] = []
    for who in who_was_measured(runs):
        by_run = {
            run.run.label: {cell.seed: cell.rows if who == "clients" else cell.newcomers for cell in run.cells}
            for run in runs
        }
        rows = [row for seeds in by_run.values() for clients in seeds.values() for row in clients.values()]
        measured = {name for name in wanted if any(score_of(row, name) is not None for row in rows)}
        metrics = [name for name in wanted if name in measured - headlines]
        if metrics:
            scores = {label: _run(seeds, metrics) for label, seeds in by_run.items()}
            entries.append({"pool": who, "metrics": metrics, "runs": scores})
    return entries


def _run(by_seed: Mapping[int, Rows], metrics: Sequence[str]) -> OtherRun:
    seeds: list[OtherSeed] = []
    for seed, rows in by_seed.items():
        clients = {client: {name: score_of(row, name) for name in metrics} for client, row in rows.items()}
        known = {name: [value for row in clients.values() if (value := row[name]) is not None] for name in metrics}
        means = {name: statistics.fmean(values) if values else None for name, values in known.items()}
        seeds.append({"seed": seed, "mean": means, "clients": clients})
    means_of = {name: [mean for seed in seeds if (mean := seed["mean"][name]) is not None] for name in metrics}
    return {"scores": {name: spread(means) for name, means in means_of.items()}, "seeds": seeds}


def client_scores(results: Comparison) -> dict[tuple[str, int], Mapping[str, Mapping[str, Any]]]:
    """By run and seed, every client's other metrics; newcomers are not among them."""
    return {
        (label, cell["seed"]): cell["clients"]
        for entry in results["other_metrics"]
        if entry["pool"] == "clients"
        for label, run in entry["runs"].items()
        for cell in run["seeds"]
    }
