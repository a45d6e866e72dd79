"""The tables of a run as plain text cells: the one place where its numbers are formatted.

Every function returns `(headers, rows)`; `rows` is empty where there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.report.comparison import Gain, baseline_labels, compared_with, gain_over, gains_over, mean_gain, run_title
from befit.report.headline import headline
from befit.report.numbers import (
    MINUS,
    NOTHING,
    bytes_text,
    counts_examples,
    decimal_text,
    gain_text,
    plain,
    score_of,
    score_text,
    seconds_text,
)
from befit.report.weights import by_group, weight_header, weight_of, weight_text, weights_of

__all__ = [
    "OVER_TIME",
    "Table",
    "client_communication_table",
    "client_table",
    "communication_table",
    "cost_table",
    "curve_table",
    "diagnostics_table",
    "failure_table",
    "headline",
    "is_numeric",
    "over_time_table",
    "stage_table",
    "summary_table",
    "updates_differ",
]

Table = tuple[list[str], list[list[str]]]
OVER_TIME = {
    "self_last": "own, last",
    "self_auc": "own, over time",
    "others_last": "others, last",
    "others_auc": "others, over time",
}


def client_table(results: Mapping[str, Any]) -> Table:
    """Per client: test examples, the baselines, the method, gains, a standard error, mixing weight.

    Gains are in points for percentages. The error is that of the last gain before it (`difference_error`), for metrics
    that have one. The family of models, and the updates (rounds whose update was used), are shown where clients differ
    in them. Methods without a mixing weight have no such column; all their diagnostics are in `diagnostics_table`.
    """
    metric, labels = results["metric"], baseline_labels(results)
    compared = compared_with(labels)
    weighted, grouped, updated = bool(weights_of(results)), by_group(results), updates_differ(results)
    judged = bool(compared) and counts_examples(metric)
    mixed = any("family" in row for row in results["clients"].values())
    headers = [
        "client",
        *["family"] * mixed,
        "test examples",
        *["updates"] * updated,
        *map(run_title, labels),
        run_title(results["method"]),
    ]
    headers += [gain_header(label) for label in compared]
    headers += ["± s.e. of a difference"] * judged + [weight_header(results)] * weighted
    rows = []
    for client, row in results["clients"].items():
        gains = [gain_over(results, row, label) for label in compared]
        error = gains[-1].error if gains and gains[-1] else None
        rows.append(
            [
                plain(client),
                *[plain(str(row.get("family", NOTHING)))] * mixed,
                str(row.get("examples") or NOTHING),  # a client that was not scored has none
                *[str(row.get("updates", NOTHING))] * updated,
                *(score_text(score_of(row.get("baselines") or {}, label), metric) for label in labels),
                score_text(score_of(row, metric), metric),
                *(gain_text(gain.value if gain else None, metric) for gain in gains),
                *[gain_text(error, metric, signed=False)] * judged,
                *[weight_text(weight_of(row, grouped), grouped)] * weighted,
            ]
        )
    return headers, rows


def gain_header(label: str) -> str:
    return f"gain over {run_title(label) if label else 'best'}"


def updates_differ(results: Mapping[str, Any]) -> bool:
    return len({row["updates"] for row in results["clients"].values() if "updates" in row}) > 1


def summary_table(results: Mapping[str, Any]) -> Table:
    """Baselines and method: mean, standard deviation over clients, worst client, and the method's gain over each.

    The gain has its standard error over clients. How many clients have a score is shown where any has none.
    """
    metric, labels = results["metric"], baseline_labels(results)
    title, clients = run_title(results["method"]), results["clients"]
    scored = {
        label: sum(score_of(row.get("baselines") or {}, label) is not None for row in clients.values())
        for label in labels
    }
    mine = sum(score_of(row, metric) is not None for row in clients.values())
    partly = any(count < len(clients) for count in (mine, *scored.values()))
    headers = ["", *["clients scored"] * partly, f"mean {metric.replace('_', ' ')}", "std", "worst client"]
    headers += [f"{title}'s gain ± s.e. over clients", "clients ahead"] * bool(labels) + ["client time"]
    rows = []
    for label in [*labels, None]:
        summary = results["summary"] if label is None else (results.get("baselines") or {}).get(label) or {}
        gains = gains_over(results, label) if label is not None else {}
        ahead = sum(gain.value > 0 for gain in gains.values())
        rows.append(
            [
                title if label is None else run_title(label),
                *[f"{mine if label is None else scored[label]} of {len(clients)}"] * partly,
                score_text(score_of(summary, "mean"), metric),
                gain_text(score_of(summary, "std"), metric, signed=False),
                _worst_text(summary.get("worst"), metric),
                *[_mean_gain_text(gains, metric), f"{ahead} of {len(gains)}" if gains else NOTHING] * bool(labels),
                seconds_text(score_of(summary, "seconds")),
            ]
        )
    return headers, rows


def _worst_text(worst: Mapping[str, Any] | None, metric: str) -> str:
    return f"{score_text(score_of(worst, 'value'), metric)} ({plain(worst['client'])})" if worst else NOTHING


def _mean_gain_text(gains: Mapping[str, Gain], metric: str) -> str:
    """Mean gain and its standard error over clients."""
    if not gains:
        return NOTHING
    mean = mean_gain(gains)
    error = f" ± {gain_text(mean.error, metric, signed=False)}" if mean.error is not None else ""
    return gain_text(mean.value, metric) + error


def over_time_table(results: Mapping[str, Any]) -> Table:
    """Baselines and method on own and on other clients' examples, at the end and on average over the scored rounds.

    Empty where no model was measured on other clients' examples.
    """
    metric, labels = results["metric"], baseline_labels(results)
    runs = [
        *((run_title(label), (results.get("baselines") or {}).get(label) or {}) for label in labels),
        (run_title(results["method"]), results["summary"]),
    ]
    found = [(title, one.get("over_time") or {}) for title, one in runs]
    if not any("others_last" in one for _, one in found):
        return [], []
    rows = [[title, *(score_text(score_of(one, key), metric) for key in OVER_TIME)] for title, one in found]
    return ["", *OVER_TIME.values()], rows


def communication_table(results: Mapping[str, Any]) -> Table:
    """Bytes of training, as encoded for the wire: in all and the mean per client; and what scoring added."""
    clients = len(results["clients"])
    headers = ["", "up, total", "down, total", "up per client", "down per client", "scoring, total"]
    runs = {label: (results.get("baselines") or {}).get(label) or {} for label in baseline_labels(results)}
    rows = []
    for title, sent in [
        *((run_title(label), run) for label, run in runs.items()),
        (run_title(results["method"]), results["summary"]),
    ]:
        up, down = score_of(sent, "bytes_up"), score_of(sent, "bytes_down")
        means = (None if total is None or not clients else total / clients for total in (up, down))
        rows.append([title, *map(bytes_text, (up, down, *means, score_of(sent, "bytes_scoring")))])
    return headers, rows


def cost_table(results: Mapping[str, Any]) -> Table:
    """Compute and memory of a step of training of each run, in units of fine-tuning one adapter, by backbone.

    Empty where no run says so, as with quantised weights.
    """
    costs = results.get("costs") or {}
    found = [
        (run_title(label), family, one)
        for label in [*baseline_labels(results), results["method"]]
        for family, one in (costs.get(label) or {}).items()
        if one.get("compute") is not None
    ]
    several = len({family for _, family, _ in found}) > 1
    public = any(one.get("public_records") for _, _, one in found)
    headers = ["", *["family"] * several, "compute of a step", "memory", *["public records"] * public]
    rows = [
        [
            title,
            *[plain(family)] * several,
            *(NOTHING if one.get(key) is None else f"{one[key]:.2f}" for key in ("compute", "memory")),
            *[_public_text(one.get("public_records") or {})] * public,
        ]
        for title, family, one in found
    ]
    return headers, rows


def _public_text(records: Mapping[str, float]) -> str:
    """
    >>> _public_text({"client": 0.0, "server": 80.0, "each": 39.87})
    '80 at the server, 39.9 for each reply'
    """
    places = {"client": "at every client", "server": "at the server", "each": "for each reply"}
    return ", ".join(f"{count:.3g} {places[key]}" for key, count in records.items() if count) or NOTHING


def client_communication_table(results: Mapping[str, Any]) -> Table:
    """The method's bytes and seconds client by client, and the number of training examples behind them."""
    headers = ["client", "training examples", "up", "down", "scoring", "client time"]
    rows = [
        [
            plain(client),
            str(row.get("train_examples", NOTHING)),
            *(bytes_text(score_of(row, key)) for key in ("bytes_up", "bytes_down", "bytes_scoring")),
            seconds_text(score_of(row, "seconds")),
        ]
        for client, row in results["clients"].items()
    ]
    return headers, rows


def stage_table(ledger: Sequence[Mapping[str, Any]]) -> Table:
    """What each stage of the method took, from the ledger: exchanges, bytes, seconds at the clients, peak memory."""
    sums: dict[tuple[str, str], list[float]] = {}
    for line in ledger:
        entry = sums.setdefault((line["stage"], line["purpose"]), [0, 0, 0, 0.0, 0.0])
        for index, value in enumerate((1, line["bytes_up"], line["bytes_down"], line["seconds"])):
            entry[index] += value
        entry[4] = max(entry[4], line.get("peak_memory_mib") or 0.0)
    headers = ["stage", "purpose", "exchanges", "up", "down", "client time", "peak memory"]
    rows = [
        [
            plain(stage),
            plain(purpose),
            f"{count:.0f}",
            bytes_text(up),
            bytes_text(down),
            seconds_text(seconds),
            f"{peak:.0f} MiB",
        ]
        for (stage, purpose), (count, up, down, seconds, peak) in sums.items()
    ]
    return headers, rows


def diagnostics_table(results: Mapping[str, Any]) -> Table:
    """Every number that the method reported about its clients, one column each."""
    rows = results["clients"]
    names = list(dict.fromkeys(name for row in rows.values() for name in row.get("diagnostics") or {}))
    if not names:
        return ["client"], []
    values = [
        [plain(client), *(decimal_text((row.get("diagnostics") or {}).get(name)) for name in names)]
        for client, row in rows.items()
    ]
    return ["client", *map(plain, names)], values


def curve_table(results: Mapping[str, Any]) -> Table:
    """The mean over clients at every round that was scored, one column per run."""
    metric, curves = results["metric"], results.get("curves") or {}
    means = {label: {point["round"]: score_of(point, "mean") for point in curve} for label, curve in curves.items()}
    rounds = sorted({round_ for points in means.values() for round_ in points})
    labels = [label for label in [*baseline_labels(results), results["method"]] if label in means]
    labels += [label for label in means if label not in labels]
    rows = [[str(at), *(score_text(means[label].get(at), metric) for label in labels)] for at in rounds]
    return ["round", *map(run_title, labels)], rows


def is_numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether every cell of a column starts with a number or has no value: such columns are set to the right.

    >>> is_numeric([["a", "+1.2"], ["b", NOTHING]], 0), is_numeric([["a", "+1.2"], ["b", NOTHING]], 1)
    (False, True)
    """
    cells = (row[column] for row in rows)
    return all(cell.lstrip(f"+{MINUS}{NOTHING}")[:1].isdigit() or cell in ("", NOTHING) for cell in cells)


def failure_table(results: Mapping[str, Any]) -> Table:
    """Client, stage, round and reason of every failure; the run where a baseline's are among them."""
    failures = results.get("failures") or []
    several = any("run" in failure for failure in failures)
    headers = ["client", *["run"] * several, "stage", "round", "reason"]
    rows = [
        [
            plain(failure["client"]),
            *[run_title(failure.get("run", results["method"]))] * several,
            plain(failure["stage"]),
            str(failure["round"]) if failure["stage"] != "export" else NOTHING,  # comes after all rounds
            plain(f"{failure['kind']}: {failure['reason']}" if failure.get("kind") else failure["reason"]),
        ]
        for failure in failures
    ]
    return headers, rows
