"""The tables of a run, each with its title; a table without rows has nothing to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.report.comparison import (
    Gain,
    compared_with,
    gain_over,
    gains_over,
    is_paired,
    mean_gain,
    run_title,
    scores_by_run,
)
from befit.report.diagnostics import ON_OTHERS, declared, on_others, share_header, share_of, share_text, shares, weights
from befit.report.numbers import NOTHING, counts_examples, listing, score_of
from befit.report.results import RunResults, baseline_labels, runs_of, split_name
from befit.report.table import BYTES, SECONDS, Cell, Table, decimals, deviation, difference, score

BY_EXAMPLES = "weighted by examples"
MAJORITY = "most frequent class"
PAIRED = 16  # clients up to which there is room for a column each
OVER_TIME = {
    "self_last": "own, last",
    "self_auc": "own, over time",
    "others_last": "others, last",
    "others_auc": "others, over time",
}


def client_table(results: RunResults, who: str = "client", download: bool = False) -> Table:
    """Per client: test examples, the most frequent class where that is known, the baselines, the method, gains, a
    standard error, and shares the method declares.

    Gains are in points for percentages; the last of them is marked as clear or not where its error is known. The error
    is that of the last gain (`Gain`), for metrics that have one. The family of models, and the updates
    (rounds whose update was used), are shown where clients differ in them. Numbers that a method declares as shares,
    such as a mixing weight, have a column; all diagnostics are in `diagnostics_table`.

    who       "client" or "newcomer"
    download  whether what a newcomer had as downloaded stands before the method's score
    """
    metric, labels, method = results["metric"], baseline_labels(results), results["method"]
    compared = compared_with(results)
    declared, updated = [shown for shown, _ in shares(results)], updates_differ(results)
    judged = bool(compared) and (is_paired(results) or counts_examples(metric))
    mixed = any("family" in row for row in results["clients"].values())
    guessed = any("majority" in row for row in results["clients"].values())
    headers = [who, *["family"] * mixed, f"{split_name(results)} examples", *["updates"] * updated]
    headers += [MAJORITY] * guessed
    headers += map(run_title, labels)
    headers += ["as downloaded"] * download + [run_title(method)]
    chosen = any(row.get("deployed") for row in results["clients"].values())
    headers += ["deployed"] * chosen
    headers += [f"gain over {run_title(label) if label else 'best'}" for label in compared]
    headers += ["± s.e. of a difference"] * judged + list(map(share_header, declared))
    rows = []
    for client, row in results["clients"].items():
        gains = [gain_over(results, row, label) for label in compared]
        last = gains[-1] if gains else None
        scores = [
            *[score_of(row, "majority")] * guessed,
            *(score_of(row.get("baselines") or {}, label) for label in labels),
            *[score_of(row, "download")] * download,
            score_of(row, metric),
        ]
        marks = [""] * (len(gains) - 1) + [last.verdict if judged and last else ""]
        rows.append(
            [
                client,
                *[str(row.get("family", NOTHING))] * mixed,
                row.get("examples") or None,  # a client that was not scored has none
                *[row.get("updates")] * updated,
                *(Cell(value, score(metric)) for value in scores),
                *[run_title(row.get("deployed") or NOTHING)] * chosen,
                *(
                    Cell(gain.value if gain else None, difference(metric), mark=mark)
                    for gain, mark in zip(gains, marks, strict=False)
                ),
                *[Cell(last.error if last else None, deviation(metric))] * judged,
                *(share_text(share_of(row, shown), shown) for shown in declared),
            ]
        )
    return Table(f"{who.capitalize()}s", headers, rows)


def updates_differ(results: RunResults) -> bool:
    """Whether clients differ in the number of rounds whose update was used."""
    return len({row["updates"] for row in results["clients"].values() if "updates" in row}) > 1


def gain_cells(gains: Mapping[str, Gain], metric: str) -> list[Cell | None]:
    """The mean gain with its standard error over clients, and how many are ahead; nothing without gains."""
    if not gains:
        return [None, None]
    mean, ahead = mean_gain(gains), sum(gain.value > 0 for gain in gains.values())
    return [Cell(mean.value, difference(metric), mean.error), Cell(f"{ahead} of {len(gains)}")]


def summary_table(results: RunResults) -> Table:
    """Baselines and method: mean, standard deviation over clients, worst client, and the method's gain over each.

    Where clients have different numbers of test examples there is the mean weighted by them too; before the runs
    stands what the class that is most frequent in each client's training scores, where that is known.
    The gain has its standard error over clients. How many clients have a score is shown where any has none.
    """
    metric, method, clients = results["metric"], results["method"], results["clients"]
    compared = bool(baseline_labels(results))
    scored = {label: sum(score is not None for score in scores) for label, scores in scores_by_run(results).items()}
    partly = any(count < len(clients) for count in scored.values())
    weighted = len({row.get("examples") for row in clients.values()}) > 1
    headers = ["", *["clients scored"] * partly, f"mean {metric.replace('_', ' ')}", *[BY_EXAMPLES] * weighted]
    headers += ["std", "worst client"]
    headers += [f"{run_title(method)}'s gain ± s.e.", "clients ahead"] * compared + ["processor time"]
    rows = []
    guess = results["summary"].get("majority")
    for label, summary in [*([(None, guess)] if guess else []), *runs_of(results)]:
        worst = summary.get("worst")
        gains = gains_over(results, label) if label and summary is not results["summary"] else {}
        count = scored[label] if label else summary.get("scored")
        rows.append(
            [
                run_title(label) if label else MAJORITY,
                *[f"{count} of {len(clients)}"] * partly,
                Cell(score_of(summary, "mean"), score(metric)),
                *[Cell(score_of(summary, "weighted_mean"), score(metric))] * weighted,
                Cell(score_of(summary, "std"), deviation(metric)),
                Cell(worst["value"], score(metric), note=f"({worst['client']})") if worst else None,
                *gain_cells(gains, metric) * compared,
                Cell(score_of(summary, "cpu_seconds"), SECONDS),
            ]
        )
    return Table("Summary", headers, rows, last=True)


def overview_table(results: RunResults) -> Table:
    """The shortest of all: the mean of every run, and the method's gain over each baseline."""
    metric, method = results["metric"], run_title(results["method"])
    rows = []
    for label, summary in runs_of(results):
        gains = gains_over(results, label) if summary is not results["summary"] else {}
        rows.append([run_title(label), Cell(score_of(summary, "mean"), score(metric)), *gain_cells(gains, metric)])
    headers = ["method", f"mean {metric.replace('_', ' ')}", f"{method}'s gain", "clients that gained"]
    shown = len(headers) if len(rows) > 1 else 2
    return Table("Overview", headers[:shown], [row[:shown] for row in rows])


def over_time_table(results: RunResults) -> Table:
    """Baselines and method on own and on other clients' examples, at the end and on average over the scored rounds.

    Empty where no model was measured on other clients' examples.
    """
    runs = [(label, summary.get("over_time") or {}) for label, summary in runs_of(results)]
    measured = any("others_last" in scores for _, scores in runs)
    rows = [
        [run_title(label), *(Cell(score_of(scores, key), score(results["metric"])) for key in OVER_TIME)]
        for label, scores in (runs if measured else [])
    ]
    return Table("Own and other clients' examples", ["", *OVER_TIME.values()], rows, last=True)


def communication_table(results: RunResults) -> Table:
    """Bytes of training, as encoded for the wire: in all and the mean per client; and what scoring added."""
    clients = len(results["clients"])
    rows = []
    for label, summary in runs_of(results):
        totals = [score_of(summary, key) for key in ("bytes_up", "bytes_down")]
        means = [None if total is None or not clients else total / clients for total in totals]
        sent = [*totals, *means, score_of(summary, "bytes_scoring")]
        rows.append([run_title(label), *(Cell(count, BYTES) for count in sent)])
    headers = ["", "up, total", "down, total", "up per client", "down per client", "scoring, total"]
    return Table("Communication", headers, rows, last=True)


def cost_table(results: RunResults) -> Table:
    """Compute and memory of a step of training of each run, in units of fine-tuning one adapter, by backbone.

    Empty where no run says so, as with quantised weights.
    """
    costs = results.get("costs") or {}
    measured = [
        (run_title(label), family, cost)
        for label, _ in runs_of(results)
        for family, cost in (costs.get(label) or {}).items()
        if cost.get("compute") is not None
    ]
    several = len({family for _, family, _ in measured}) > 1
    public = any(cost.get("public_records") for _, _, cost in measured)
    headers = ["", *["family"] * several, "compute of a step", "memory", *["public records"] * public]
    rows = [
        [
            title,
            *[family] * several,
            *(Cell(cost.get(key), decimals(2)) for key in ("compute", "memory")),
            *[_public_text(cost.get("public_records") or {})] * public,
        ]
        for title, family, cost in measured
    ]
    return Table("Compute and memory", headers, rows, last=True)


def _public_text(records: Mapping[str, float]) -> str:
    """
    >>> _public_text({"client": 0.0, "server": 80.0, "each": 39.87})
    '80 at the server, 39.9 for each reply'
    """
    places = {"client": "at every client", "server": "at the server", "each": "for each reply"}
    places |= {"opening": "before the first round"}
    return ", ".join(f"{count:.3g} {places[key]}" for key, count in records.items() if count) or NOTHING


def client_communication_table(results: RunResults) -> Table:
    """The method's bytes and seconds client by client, and the number of training examples behind them."""
    rows = [
        [
            client,
            row.get("train_examples"),
            *(Cell(score_of(row, key), BYTES) for key in ("bytes_up", "bytes_down", "bytes_scoring")),
            *(Cell(score_of(row, key), SECONDS) for key in ("seconds", "cpu_seconds")),
        ]
        for client, row in results["clients"].items()
    ]
    headers = ["client", "training examples", "up", "down", "scoring", "client time", "processor time"]
    return Table(f"{run_title(results['method'])}, client by client", headers, rows, detail=True)


def stage_table(ledger: Sequence[Mapping[str, Any]], method: str = "") -> Table:
    """What each stage of the method took, from the ledger, at the clients and at the server: exchanges, bytes, seconds
    as clocks on walls show them and of processors, peak memory."""
    sums: dict[tuple[str, str], list[float]] = {}
    for line in ledger:
        entry = sums.setdefault((line["stage"], line["purpose"]), [0, 0, 0, 0.0, 0.0, 0.0])
        spent = (line[key] for key in ("bytes_up", "bytes_down", "seconds", "cpu_seconds"))
        for index, value in enumerate((1, *spent)):
            entry[index] += value
        entry[5] = max(entry[5], line["peak_memory_mib"])
    rows = [
        [
            *(stage, purpose, count, Cell(up, BYTES), Cell(down, BYTES)),
            *(Cell(wall, SECONDS), Cell(cpu, SECONDS), f"{peak:.0f} MiB"),
        ]
        for (stage, purpose), (count, up, down, wall, cpu, peak) in sums.items()
    ]
    headers = ["stage", "purpose", "exchanges", "up", "down", "time", "processor time", "peak memory"]
    return Table(f"{run_title(method)}, stage by stage", headers, rows, detail=True)


def metrics_table(results: RunResults) -> Table:
    """The method's further metrics, client by client; nothing where only the headline was measured."""
    names = results.get("metrics") or []
    rows = [
        [client, *(Cell(score_of(row, name), score(name)) for name in names)]
        for client, row in results["clients"].items()
    ]
    title = f"All metrics of {run_title(results['method'])}"
    return Table(title, ["client", *(name.replace("_", " ") for name in names)], rows if len(names) > 1 else [])


def confusion_table(results: RunResults) -> Table:
    """Of each client, which classes were taken for which, the most frequent confusion first; up to three of them."""
    rows = []
    for client, row in results["clients"].items():
        wrong = [
            (count, label, answer)
            for label, answers in (row.get("confusion") or {}).items()
            for answer, count in answers.items()
            if label != answer
        ]
        first = sorted(wrong, key=lambda confusion: -confusion[0])[:3]
        if first:
            rows.append(
                [
                    client,
                    "; ".join(
                        f"{label} as {answer}, {'once' if count == 1 else f'{count} times'}"
                        for count, label, answer in first
                    ),
                ]
            )
    title = f"Most frequent confusions of {run_title(results['method'])}"
    return Table(title, ["client", "taken for another class"], rows, detail=True)


def diagnostics_table(results: RunResults) -> Table:
    """Every number that the method reported about its clients, one column each, and where more is said of them."""
    clients = {client: row.get("diagnostics") or {} for client, row in results["clients"].items()}
    names = list(dict.fromkeys(name for diagnostics in clients.values() for name in diagnostics))
    rows = [[client, *(diagnostics.get(name) for name in names)] for client, diagnostics in clients.items()]
    title, note = f"All diagnostics of {run_title(results['method'])}", diagnostics_note([results["method"]])
    return Table(title, ["client", *names], rows if names else [], note, detail=True)


def diagnostics_note(labels: Sequence[str]) -> str:
    """Where more is said of what these runs report; nothing for methods that are not registered."""
    from befit.protocol.registry import method_names

    names = dict.fromkeys(
        name for label in labels for name in (label, label.partition("-")[0]) if name in method_names()
    )
    pages = [f"docs/methods/{name}.md" for name in names]
    return f"What the method does with these numbers: {listing(pages)}." * bool(pages)


def pair_tables(results: RunResults) -> list[Table]:
    """Clients against clients: each model on each client's examples, and how much each counts for each."""
    maps = [(ON_OTHERS, "model of", on_others(results), score(results["metric"]))]
    maps += [(shown["title"], "client", weights(results), decimals(2)) for shown in declared(results, "weights")]
    columns = list(results["clients"])
    return [
        Table(
            title,
            [corner, *columns],
            [[client, *(Cell(row.get(column), unit) for column in columns)] for client, row in rows.items()],
            detail=True,
        )
        for title, corner, rows, unit in maps
        if rows and len(columns) <= PAIRED
    ]


def curve_table(results: RunResults) -> Table:
    """The mean over clients at every round that was scored, one column per run."""
    metric, curves = results["metric"], results.get("curves") or {}
    means = {label: {point["round"]: score_of(point, "mean") for point in curve} for label, curve in curves.items()}
    rounds = sorted({round_ for points in means.values() for round_ in points})
    labels = [label for label, _ in runs_of(results) if label in means]
    labels += [label for label in means if label not in labels]
    rows = [[str(at), *(Cell(means[label].get(at), score(metric)) for label in labels)] for at in rounds]
    return Table("Mean over rounds", ["round", *map(run_title, labels)], rows, detail=True)


def failure_table(results: RunResults) -> Table:
    """Client, stage, round and reason of every failure; the run where a baseline's are among them."""
    failures = results.get("failures") or []
    several = any("run" in failure for failure in failures)
    rows = [
        [
            failure["client"],
            *[run_title(failure.get("run", results["method"]))] * several,
            failure["stage"] + ", score" * bool(failure.get("scoring")),
            failure["round"] if failure["stage"] != "export" else None,  # comes after all rounds
            f"{failure['kind']}: {failure['reason']}" if failure.get("kind") else failure["reason"],
        ]
        for failure in failures
    ]
    return Table("Failures", ["client", *["run"] * several, "stage", "round", "reason"], rows)
