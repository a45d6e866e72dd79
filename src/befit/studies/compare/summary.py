"""From the numbers of finished cells to compare.json: spread over seeds, who is better than the reference, and why not.

Seeds are the independent repetitions. The clients of one seed share a model and a partition, so tests over clients
count too much; they are given beside the others because reviewers ask for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from befit.config.experiment import to_dict
from befit.data.limit import limit_sentence
from befit.report.numbers import count_text, gain_text, listing, score_text
from befit.studies.compare.beside import COMPARED
from befit.studies.compare.collect import Finished, Scores
from befit.studies.compare.execute import CellFailure
from befit.studies.compare.grids import GridTable
from befit.studies.compare.other_metrics import other_metrics
from befit.studies.compare.plan import Plan
from befit.studies.compare.statistics import LEAST_PAIRS, LEVEL, Spread, holm, paired, reach, signed_ranks, spread
from befit.studies.compare.wins import budget_means, wins_of

__all__ = ["FEW_SEEDS", "limit_of", "summarise"]

FEW_SEEDS = 5  # below, differences that matter can be missed: said in words beside the tests


def summarise(plan: Plan, runs: Sequence[Finished], failures: Sequence[CellFailure]) -> dict[str, Any]:
    """Everything that tables, plots and files show. `runs` have at least one finished cell in all."""
    cells = [cell for run in runs for cell in run.cells]
    reference = next(run for run in runs if run.run.label == plan.reference)
    compared = {run.run.label: _against(run, reference) for run in runs if run is not reference}
    beside = {run.run.label: _beside_against(run, reference) for run in runs if run is not reference}
    for key in ("t", "signed"):
        _adjust([one[key] for one in compared.values() if one is not None])
    for key in COMPARED:
        _adjust([one[key] for one in beside.values() if key in one])
    results: dict[str, Any] = {
        "title": plan.head.title,
        "about": plan.head.about,
        "paper": plan.head.paper,
        "table": plan.head.table,
        "note": plan.head.note,
        "name": plan.name,
        "metric": cells[0].metric,
        "split": cells[0].split,
        "higher_is_better": True,
        "seeds": list(plan.seeds),
        "reference": plan.reference,
        "runs": [_run(run, compared.get(run.run.label), beside.get(run.run.label, {})) for run in runs],
        "tables": [_table(table) for table in plan.tables],
        "other_metrics": other_metrics(runs),
        "budgets": budget_means(runs),
        "wins": wins_of(runs),
        "failures": [
            {"run": one.label, "seed": one.seed, "error": one.error, "traceback": one.traceback} for one in failures
        ],
    }
    results["sentences"] = sentences(results)
    return results


def _adjust(tests: Sequence[dict[str, Any]]) -> None:
    """Give every test its p after Holm's correction for all of them."""
    adjusted = holm({str(place): one["p"] for place, one in enumerate(tests)})
    for place, one in enumerate(tests):
        one["p_holm"] = adjusted[str(place)]


def _run(finished: Finished, against: dict[str, Any] | None, beside: dict[str, Any]) -> dict[str, Any]:
    """One run: every seed's numbers, and their spread."""
    cells = finished.cells
    means = [statistics.fmean(cell.known.values()) for cell in cells if cell.known]
    worst = [min(cell.known.values()) for cell in cells if cell.known]
    clients = dict.fromkeys(client for cell in cells for client in cell.clients)
    return {
        "label": finished.run.label,
        "method": finished.run.method,
        "paper": finished.run.paper,
        "mean": _spread(means),
        "worst": _spread(worst),
        "clients": {
            client: _spread([cell.known[client] for cell in cells if client in cell.known]) for client in clients
        },
        **{
            key: statistics.fmean(getattr(cell, key) for cell in cells) if cells else None
            for key in ("bytes_up", "bytes_down", "seconds", "steps")
        },
        "curve": _curve(cells),
        "failed_exchanges": sum(cell.failures for cell in cells),
        "against": against,
        "beside": {
            key: _spread([cell.beside[key] for cell in cells if key in cell.beside])
            for key in dict.fromkeys(key for cell in cells for key in cell.beside)
        },
        "beside_against": beside,
        "seeds": [
            {
                "seed": cell.seed,
                "folder": cell.folder,
                "mean": statistics.fmean(cell.known.values()) if cell.known else None,
                "bytes_up": cell.bytes_up,
                "bytes_down": cell.bytes_down,
                "seconds": cell.seconds,
                "steps": cell.steps,
                "data": cell.data,
                "clients": cell.clients,
                "examples": cell.examples,
                "beside": cell.beside,
            }
            for cell in cells
        ],
        "config": to_dict(finished.run.cells[0].experiment),
    }


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    found = spread(values)
    return None if found is None else {"mean": found.mean, "sd": found.sd, "n": len(values)}


def _curve(cells: Sequence[Scores]) -> list[dict[str, Any]]:
    """Mean over seeds at every round that all of them scored."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for cell in cells:
        for point in cell.curve:
            if point["mean"] is not None:
                by_round.setdefault(point["round"], []).append(point)
    keys = ("mean", "bytes_up", "bytes_down")
    return [
        {"round": at, **{key: statistics.fmean(point[key] for point in points) for key in keys}}
        for at, points in sorted(by_round.items())
        if len(points) == len(cells)
    ]


def _against(run: Finished, reference: Finished) -> dict[str, Any] | None:
    """Differences from the reference, paired by seed and client; None where no seed has the same clients and data."""
    by_seed: list[list[float]] = []
    for cell, other in _pairs(run, reference):
        known = [client for client in cell.known if client in other.known]
        if known:
            by_seed.append([cell.known[client] - other.known[client] for client in known])
    if not by_seed:
        return None
    t = paired([statistics.fmean(differences) for differences in by_seed])
    signed = signed_ranks([value for differences in by_seed for value in differences])
    assert t is not None
    return {"t": vars(t).copy(), "signed": {**vars(signed), "n": signed.n}}


def _pairs(run: Finished, reference: Finished) -> list[tuple[Scores, Scores]]:
    """The seeds that both have; none at all where any seed has other clients or data."""
    theirs = {cell.seed: cell for cell in reference.cells}
    pairs = [(cell, theirs[cell.seed]) for cell in run.cells if cell.seed in theirs]
    same = all(cell.data == other.data and cell.clients.keys() == other.clients.keys() for cell, other in pairs)
    return pairs if same else []


def _beside_against(run: Finished, reference: Finished) -> dict[str, Any]:
    """Of the scores beside the mean, the differences of seeds from the reference, as a paired test."""
    pairs = _pairs(run, reference)
    differences = {
        key: [
            cell.beside[key] - other.beside[key] for cell, other in pairs if key in cell.beside and key in other.beside
        ]
        for key in COMPARED
    }
    tests = {key: paired(values) for key, values in differences.items()}
    return {key: vars(test).copy() for key, test in tests.items() if test is not None}


def _table(table: GridTable) -> dict[str, Any]:
    """A grid's table with its cells as lists of rows: labels of runs, reasons and the paper's numbers, or null."""

    def laid(values: Mapping[tuple[int, int], Any]) -> list[list[Any]]:
        return [[values.get((i, j)) for j in range(len(table.columns))] for i in range(len(table.rows))]

    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "corner": table.corner,
        "rows": [list(one) for one in table.rows],
        "columns": [list(one) for one in table.columns],
        "runs": laid(table.runs),
        "reasons": laid(table.reasons),
        "paper": laid(table.paper),
    }


def verdict(against: Mapping[str, Any] | None) -> str:
    """What the test over seeds allows to say of a run, after Holm's correction."""
    if against is None:
        return "not the same clients and data"
    t = against["t"]
    if t["n"] < 2:
        return "one seed"
    if t["p_holm"] is None:
        return "the same difference in every seed"
    if t["p_holm"] >= LEVEL:
        return "no difference shown"
    return "better" if t["mean"] > 0 else "worse"


def sentences(results: Mapping[str, Any]) -> list[str]:
    """What the comparison shows and what it cannot, the most important first."""
    metric, reference = results["metric"], results["reference"]
    runs = [run for run in results["runs"] if run["mean"]]
    if not runs:
        return ["No run has a score."]
    best = max(runs, key=lambda run: run["mean"]["mean"])
    mean = Spread(best["mean"]["mean"], best["mean"]["sd"])
    text = score_text(mean.mean, metric)
    if mean.sd is not None:
        text += f" ± {gain_text(mean.sd, metric, signed=False)} over {count_text(best['mean']['n'], 'seed')}"
    tied = [run["label"] for run in runs if _shown(run, metric) == _shown(best, metric)]
    highest = f"Highest mean {metric.replace('_', ' ')}"
    said = [f"{highest}: {best['label']}, {text}."]
    if len(tied) > 1:  # to the digits that are shown: then none of them is named as ahead
        said = [
            f"{highest}, a tie of {count_text(len(tied), 'run')} ({listing(tied)}): {score_text(mean.mean, metric)}."
        ]
    if (limit := limit_sentence(limit_of(results))) is not None:
        said.insert(0, limit)
    verdicts = {run["label"]: verdict(run["against"]) for run in runs if run["label"] != reference}
    for word in ("better", "worse"):
        if found := [label for label, one in verdicts.items() if one == word]:
            said.append(
                f"{word.capitalize()} than {reference}: {listing(found)} (p < {LEVEL} over seeds, after Holm's "
                "correction)."
            )
    unclear = sum(one == "no difference shown" for one in verdicts.values())
    if unclear:
        said.append(f"No difference from {reference} is shown for {count_text(unclear, 'run')}.")
    said += _limits(results, len(verdicts))
    if results["failures"]:
        said.append(f"Without results, and missing here: {count_text(len(results['failures']), 'cell')}.")
    return said


def limit_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The limit of the runs' data and rounds, of the first run that has one; empty without."""
    limits = (run["config"].get("limit") or {} for run in results["runs"])
    return next((dict(limit) for limit in limits if limit_sentence(limit) is not None), {})


def _shown(run: Mapping[str, Any], metric: str) -> str:
    return score_text(run["mean"]["mean"], metric)


def _limits(results: Mapping[str, Any], comparisons: int) -> list[str]:
    """How much these seeds and clients can show at all."""
    known = [run["against"] for run in results["runs"] if run["against"]]
    if not known:
        return []
    n = min(one["t"]["n"] for one in known)
    pairs = min(one["signed"]["n"] for one in known)
    said = []
    if n < 2:
        said.append("With one seed there is no spread, and nothing follows about which method is better.")
    elif n < FEW_SEEDS:
        needed = reach(n)
        said.append(
            f"{n} seeds are few: a mean difference has to be {needed:.1f} times its own standard deviation "
            f"over seeds before a single test finds it, and more after correcting for "
            f"{count_text(comparisons, 'comparison')}."
        )
    if pairs < LEAST_PAIRS:
        said.append(
            f"{count_text(pairs, 'pair')} of clients and seeds are too few for a signed-rank test "
            f"({LEAST_PAIRS} at least)."
        )
    return said
