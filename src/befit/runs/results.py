"""From the logs of finished runs to `results.json`: per client, in summary, over rounds, and against the baselines."""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from befit.core.metrics import spread
from befit.core.storage import read_lines
from befit.protocol.federate import OPENING
from befit.protocol.registry import ALONE
from befit.report.comparison import paired_error

_NOTHING = {"updates": 0, "bytes_up": 0, "bytes_down": 0, "bytes_scoring": 0, "seconds": 0.0, "cpu_seconds": 0.0}


def method_results(
    path: Path,
    clients: Sequence[str],
    train_examples: Mapping[str, int],
    metric: str,
    curve_stages: Sequence[str],
    last: tuple[str, int],
    federated: Collection[str],
    best: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Results of one method's run directory.

    curve_stages  the stages whose rounds count on the curve, in order: a later one of a single round, such as a merge,
                  replaces the last point
    last          the last stage and its last round: a client without a score there has none, whatever it had before
    federated     the stages whose rounds `updates` counts: those with exchanges, or all where there are none
    best          stages that went back to their best round, with that round: nothing that was measured in later rounds
                  counts, and all that these cost does
    ->  clients (per client: metrics, examples, updates, bytes, seconds as clocks on walls show them and of processors,
        diagnostics), summary, curve, failures

    `summary.over_time` has A_last and A_AUC (Seo et al. 2026, FedMosaic): the last value and the mean over all
    scored rounds of the clients' mean, on own test examples (`self`) and, where measured, on all other clients'
    (`others`); a client's own `over_time` has the same of it alone. Where they are known, a client's row has
    `on_others`, its model's headline on each other client's examples, `each`, the headline of each of its own (see
    `befit.report.comparison.compact`), `confusion`, what each of its classes was taken for, and `weights`, how much
    each client counts in what it is sent next, all as they are at the end. `summary.server_cpu_seconds` is the server's
    processor time for downloads and aggregation and for what came before the first round, which is
    `opening_cpu_seconds` of it. `updates` counts the rounds of `federated` whose update was used. Bytes include those
    of exchanges that failed.
    """
    metrics, ledger = read_lines(path / "metrics.jsonl"), read_lines(path / "ledger.jsonl")
    best = best or {}

    def counts(line: Mapping[str, Any]) -> bool:
        return line["round"] <= best.get(line["stage"], line["round"])

    metrics = [line for line in metrics if line["kind"] == "failure" or counts(line)]
    rows = {client: unscored_row(metric, train_examples[client]) for client in clients}
    _add_metrics(rows, metrics, last)
    summary = {**over_rows(rows, metric), **_add_costs(rows, ledger, federated)}
    failures = [
        {
            **{key: line[key] for key in ("client", "stage", "round", "reason")},
            "kind": line["error"],
            **({"scoring": True} if line.get("scoring") else {}),
        }
        for line in metrics
        if line["kind"] == "failure"
    ]
    led_there = [line for line in ledger if counts(line)]
    own, others = (_scored_points(metrics, led_there, name, curve_stages) for name in (metric, "others"))
    curve = [_over_point(point) for point in own]
    summary["over_time"] = _over_time(
        [point["mean"] for point in curve], [_over_point(point)["mean"] for point in others]
    )
    for client, row in rows.items():
        series = ([point.scores[client] for point in points if client in point.scores] for points in (own, others))
        row["over_time"] = _over_time(*series)
    return {"clients": rows, "summary": summary, "curve": curve, "failures": failures}


def _add_metrics(
    rows: Mapping[str, dict[str, Any]], metrics: Sequence[Mapping[str, Any]], last: tuple[str, int]
) -> None:
    """Add what clients said of their training, and what their models had in the last round, to their rows."""
    at_the_end = {"others": "on_others", "each": "each", "confusion": "confusion"}
    for line in metrics:
        kind, ends = line["kind"], (line["stage"], line["round"]) == last
        if kind == "diagnostic":
            rows[line["client"]]["diagnostics"][line["name"]] = line["value"]
        elif kind == "weights":
            rows[line["client"]]["weights"] = line["values"]
        elif kind == "score" and ends:
            rows[line["client"]].update({line["metric"]: line["value"], "examples": line["examples"]})
        elif kind in at_the_end and ends:
            rows[line["client"]][at_the_end[kind]] = line["values"]


def _add_costs(
    rows: Mapping[str, dict[str, Any]], ledger: Sequence[Mapping[str, Any]], federated: Collection[str]
) -> dict[str, Any]:
    """Add what each client sent and computed to its row; returns the sums, and what the server computed."""
    peak = 0.0
    server: dict[str, Any] = {"opening_cpu_seconds": 0.0, "opening_peak_memory_mib": 0.0, "server_cpu_seconds": 0.0}
    for line in ledger:
        if line["purpose"] == "server":
            server["server_cpu_seconds"] += line["cpu_seconds"]
            if line["stage"] == OPENING:
                server["opening_cpu_seconds"] = line["cpu_seconds"]
                server["opening_peak_memory_mib"] = line["peak_memory_mib"]
            continue
        row = rows[line["client"]]
        peak = max(peak, line["peak_memory_mib"])
        if line["purpose"] in ("train", "failed"):
            if line["purpose"] == "train" and line["stage"] in federated:
                row["updates"] += line.get("span", 1)
            for key in ("bytes_up", "bytes_down", "seconds", "cpu_seconds"):
                row[key] += line[key]
        else:
            row["bytes_scoring"] += line["bytes_up"] + line["bytes_down"]
    sums = {key: sum(row[key] for row in rows.values()) for key in _NOTHING if key != "updates"}
    return {**sums, "peak_memory_mib": peak, **server}


def over_clients(values: Mapping[str, float | None], examples: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Mean, standard deviation over clients (0 for one client) and the worst client; None without any value.

    examples  how many each value is of: then there is also `weighted_mean`
    """
    known = {client: value for client, value in values.items() if value is not None}
    over = spread(list(known.values()))
    if over is None:
        return {"scored": 0, "mean": None, "std": None, "worst": None}
    weights = [examples[client] for client in known] if examples else []
    weighted = sum(map(operator.mul, weights, known.values())) / sum(weights) if sum(weights) else None
    worst = min(known, key=lambda client: (known[client], client))
    return {
        "scored": over["n"],
        "mean": over["mean"],
        "std": over["sd"] or 0.0,
        **({} if weighted is None else {"weighted_mean": weighted}),
        "worst": {"client": worst, "value": known[worst]},
    }


def unscored_row(metric: str, train_examples: int) -> dict[str, Any]:
    """The row of a client of which nothing else is known."""
    return {metric: None, "examples": 0, "train_examples": train_examples, **_NOTHING, "diagnostics": {}}


def over_rows(rows: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """`over_clients` of a metric in clients' rows, weighted by their test examples too."""
    counts = {client: row.get("examples") or 0 for client, row in rows.items()}
    return over_clients({client: row[metric] for client, row in rows.items()}, counts)


def add_majority(
    rows: Mapping[str, dict[str, Any]], scores: Mapping[str, float | None], summary: dict[str, Any]
) -> None:
    """Add to the clients' rows and the summary what the class that is most frequent in training scores, by client."""
    known = {client: score for client, score in scores.items() if score is not None and client in rows}
    for client, score in known.items():
        rows[client]["majority"] = score
    if known:
        counts = {client: rows[client].get("examples") or 0 for client in known}
        summary["majority"] = over_clients(known, counts)


def _over_time(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """A_last and A_AUC of the scores at the points of a run, in order; nothing where there are none."""
    return {
        f"{name}_{which}": value
        for name, scores in (("self", own), ("others", others))
        if scores
        for which, value in (("last", scores[-1]), ("auc", statistics.fmean(scores)))
    }


@dataclass(frozen=True)
class _Point:
    """The clients' scores in a scored round, and the bytes sent in all until then."""

    round: int
    scores: dict[str, float]
    bytes_up: int
    bytes_down: int


def _over_point(point: _Point) -> dict[str, Any]:
    """Mean, least and most over clients."""
    values = list(point.scores.values())
    over = {"round": point.round, "mean": statistics.fmean(values), "min": min(values), "max": max(values)}
    return {**over, "bytes_up": point.bytes_up, "bytes_down": point.bytes_down}


def _scored_points(
    metrics: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], metric: str, stages: Sequence[str]
) -> list[_Point]:
    """The scored rounds of the curve, in order."""
    main = stages[0]
    trained = {line["stage"] for line in ledger if line["purpose"] == "train"}
    bytes_at: dict[tuple[str, int], tuple[int, int]] = {}
    up = down = 0
    for line in ledger:
        if line["purpose"] == "train":
            up, down = up + line["bytes_up"], down + line["bytes_down"]
            bytes_at[line["stage"], line["round"]] = up, down
    scores: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in metrics:
        if line["kind"] == "score" and line["metric"] == metric and line["value"] is not None:
            scores[line["stage"], line["round"]][line["client"]] = line["value"]
    last = max((round_ for stage, round_ in bytes_at if stage == main), default=0)
    points: dict[int, _Point] = {}
    for (stage, round_), values in scores.items():
        if stage not in stages or stage not in trained:
            continue
        at = round_ if stage == main else last
        points[at] = _Point(at, values, *bytes_at.get((stage, round_), (up, down)))
    return [points[at] for at in sorted(points)]


def against_baselines(results: dict[str, Any], baselines: Mapping[str, Mapping[str, Any]], metric: str) -> None:
    """Add to each client its baselines and gains, and to the summary who gained over training alone.

    `errors` has the standard error of the difference from each baseline, where both were measured example by example;
    none of the one that a client deploys, which is the same model.
    `gain` is over the best baseline of that client, `gain_over_local` over training alone; higher is
    better in every metric of ours.
    """
    for client, row in results["clients"].items():
        others = {name: other["clients"][client][metric] for name, other in baselines.items()}
        row["baselines"] = others
        singles = {name: other["clients"][client].get("each") for name, other in baselines.items()}
        errors = {
            name: paired_error(row["each"], each)
            for name, each in singles.items()
            if each and row.get("each") and name != row.get("deployed")
        }
        if errors:
            row["errors"] = errors
        known = [value for value in others.values() if value is not None]
        if row[metric] is None or not known:
            continue
        row["gain"] = row[metric] - max(known)
        if others.get(ALONE) is not None:
            row["gain_over_local"] = row[metric] - others[ALONE]
    compared = {c: row["gain_over_local"] for c, row in results["clients"].items() if "gain_over_local" in row}
    results["summary"]["gained"] = [client for client, gain in compared.items() if gain > 0]
    results["summary"]["not_gained"] = [client for client, gain in compared.items() if gain <= 0]
    results["baselines"] = {name: other["summary"] for name, other in baselines.items()}
