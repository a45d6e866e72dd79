"""Every metric beside the headline: each client's number, means over clients, and their spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from befit.report.numbers import plain, score_of, spread_text
from befit.report.table import Table
from befit.runs.groups import Rows
from befit.studies.compare.collect import Finished
from befit.studies.compare.series import metrics_of, pools_of
from befit.studies.compare.statistics import spread

__all__ = ["client_scores", "other_metrics", "other_tables"]

UNPARSABLE = "unparsable"  # measured with choice_parse, without being asked for
UNPARSABLE_NOTE = f" {UNPARSABLE}: the share of answers that name none of the choices; lower is better."


def other_metrics(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """One entry for clients and one for newcomers, each where metrics beside the headline were measured of them.

    ->  pool ("clients" or "newcomers"), metrics (those of `evaluate.metrics` after the headline that some run has, then
        `unparsable`), and `runs` by label: `scores` by metric (mean over seeds of the mean over clients, SD with n - 1,
        n; or None), and `seeds`: seed, `mean` by metric, `clients` by name and metric; None where not measured
    """
    found = [(run, cell) for run in runs for cell in run.cells]
    wanted = dict.fromkeys(name for run, cell in found for name in [*metrics_of(cell, run), UNPARSABLE])
    made = []
    for pool in pools_of(runs):
        by_run = {
            run.run.label: {cell.seed: cell.rows if pool == "clients" else cell.newcomers for cell in run.cells}
            for run in runs
        }
        rows = [row for seeds in by_run.values() for of in seeds.values() for row in of.values()]
        headlines = {cell.metric for _, cell in found}
        measured = {name for name in wanted if any(score_of(row, name) is not None for row in rows)}
        metrics = [name for name in wanted if name in measured - headlines]
        if metrics:
            made.append(
                {
                    "pool": pool,
                    "metrics": metrics,
                    "runs": {label: _run(seeds, metrics) for label, seeds in by_run.items()},
                }
            )
    return made


def _run(by_seed: Mapping[int, Rows], metrics: Sequence[str]) -> dict[str, Any]:
    seeds = []
    for seed, rows in by_seed.items():
        clients = {client: {name: score_of(row, name) for name in metrics} for client, row in rows.items()}
        known = {name: [value for one in clients.values() if (value := one[name]) is not None] for name in metrics}
        means = {name: statistics.fmean(values) if values else None for name, values in known.items()}
        seeds.append({"seed": seed, "mean": means, "clients": clients})
    scores = {}
    for name in metrics:
        values = [value for one in seeds if (value := one["mean"][name]) is not None]
        over = spread(values)
        scores[name] = None if over is None else {"mean": over.mean, "sd": over.sd, "n": len(values)}
    return {"scores": scores, "seeds": seeds}


def other_tables(results: Mapping[str, Any]) -> list[Table]:
    """A row for each run, a column for each metric beside the headline; newcomers apart."""
    made = []
    for one in results["other_metrics"]:
        pool, metrics = one["pool"], one["metrics"]
        rows = [
            [plain(label), *(spread_text(run["scores"][name], name) for name in metrics)]
            for label, run in one["runs"].items()
        ]
        note = f"Mean over {pool} on {results['split']} examples, ± SD over seeds (n - 1), of what was measured beside "
        note += f"{results['metric']}.{UNPARSABLE_NOTE * (UNPARSABLE in metrics)}"
        title = "Other metrics" + ", newcomers" * (pool == "newcomers")
        made.append(Table(title, ["run", *map(plain, metrics)], rows, note))
    return made


def client_scores(results: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Mapping[str, Any]]]:
    """By run and seed, every client's other metrics; newcomers are not among them."""
    return {
        (label, cell["seed"]): cell["clients"]
        for one in results["other_metrics"]
        if one["pool"] == "clients"
        for label, run in one["runs"].items()
        for cell in run["seeds"]
    }
