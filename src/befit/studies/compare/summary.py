"""From the numbers of finished cells to compare.json: spread over seeds, who is better than the reference, and why not.

Seeds are the independent repetitions. The clients of one seed share a model and a partition, so tests over clients
count too much; they are given beside the others because reviewers ask for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

from befit.config.experiment import to_dict
from befit.core.metrics import Spread, spread
from befit.data.limit import limit_sentence
from befit.report.diagnostics import alarm_text
from befit.report.numbers import count_text, is_share, listing, score_of, score_text
from befit.report.table import mean_cell
from befit.studies.compare.beside import COMPARED
from befit.studies.compare.claims import scores_by_seed, verdicts
from befit.studies.compare.collect import FinishedRun, Scores
from befit.studies.compare.execute import CellFailure
from befit.studies.compare.grids import GridTable
from befit.studies.compare.other_metrics import other_metrics
from befit.studies.compare.plan import Plan
from befit.studies.compare.results import (
    Against,
    ChosenSettings,
    Comparison,
    GridResults,
    RunScores,
    ScoredRound,
    SeedScores,
    SignedTest,
    TTest,
)
from befit.studies.compare.statistics import (
    LEAST_PAIRS,
    Pair,
    by_example,
    holm,
    mean_difference,
    paired,
    reach,
    signed_ranks,
)
from befit.studies.compare.wins import budget_means, wins_of

UNPAIRED, CONSTANT = "not the same clients and data", "the same difference in every seed"
FEW_SEEDS = 5  # below, differences that matter can be missed, which a sentence says


def summarise(plan: Plan, runs: Sequence[FinishedRun], failures: Sequence[CellFailure]) -> Comparison:
    """Everything that tables, plots and files show. `runs` have at least one finished cell in all."""
    cells = [cell for run in runs for cell in run.cells]
    reference = next(run for run in runs if run.run.label == plan.reference)
    others = [run for run in runs if run is not reference]
    compared = {run.run.label: _against(run, reference) for run in others}
    beside = {run.run.label: _beside_against(run, reference) for run in others}
    _adjust([against["t"] for against in compared.values() if against is not None])
    _adjust([against["signed"] for against in compared.values() if against is not None])
    for key in COMPARED:
        _adjust([tests[key] for tests in beside.values() if key in tests])
    results: Comparison = {
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
        "level": plan.head.level,
        "reference": plan.reference,
        "runs": [_run(run, compared.get(run.run.label), beside.get(run.run.label, {})) for run in runs],
        "tables": [_grid(table) for table in plan.tables],
        "other_metrics": other_metrics(runs),
        "budgets": budget_means(runs),
        "wins": wins_of(runs),
        "failures": [
            {"run": cell.label, "seed": cell.seed, "error": cell.error, "traceback": cell.traceback}
            for cell in failures
        ],
        "claims": verdicts(plan.claims, scores_by_seed(runs), 100 if is_share(cells[0].metric) else 1, plan.head.level),
        "chosen": _chosen(plan),
        "sentences": [],
    }
    results["sentences"] = sentences(results)
    return results


def _chosen(plan: Plan) -> ChosenSettings | None:
    if plan.chosen is None:
        return None
    return {
        "file": plan.chosen.file,
        "sha256": plan.chosen.sha256,
        "seeds": list(plan.chosen.seeds),
        "settings": {label: dict(combination) for label, combination in plan.chosen.settings.items()},
        "changed": list(plan.changed),
    }


def _adjust(tests: Sequence[TTest] | Sequence[SignedTest]) -> None:
    """Give every test its p after Holm's correction for all of them."""
    adjusted = holm({str(place): test["p"] for place, test in enumerate(tests)})
    for place, test in enumerate(tests):
        test["p_holm"] = adjusted[str(place)]


def _run(finished: FinishedRun, against: Against | None, beside: dict[str, TTest]) -> RunScores:
    """One run: every seed's numbers, and their spread."""
    cells = finished.cells
    clients = dict.fromkeys(client for cell in cells for client in cell.clients)
    return {
        "label": finished.run.label,
        "method": finished.run.method,
        "paper": finished.run.paper,
        "mean": spread([statistics.fmean(cell.known.values()) for cell in cells if cell.known]),
        "worst": spread([min(cell.known.values()) for cell in cells if cell.known]),
        "clients": {
            client: spread([cell.known[client] for cell in cells if client in cell.known]) for client in clients
        },
        "bytes_up": _mean([cell.bytes_up for cell in cells]),
        "bytes_down": _mean([cell.bytes_down for cell in cells]),
        "seconds": _mean([cell.seconds for cell in cells]),
        "cpu_seconds": _mean([cell.cpu_seconds for cell in cells]),
        "server_cpu_seconds": _mean([cell.server_cpu_seconds for cell in cells]),
        "steps": _mean([cell.steps for cell in cells]),
        "curve": _curve(cells),
        "failed_exchanges": sum(cell.failures for cell in cells),
        "against": against,
        "beside": _spreads([cell.beside for cell in cells]),
        "beside_against": beside,
        "diagnostics": _spreads([cell.diagnostics for cell in cells]),
        "remarks": _remarks(cells),
        "seeds": [cast(SeedScores, {key: getattr(cell, key) for key in SeedScores.__annotations__}) for cell in cells],
        "config": to_dict(finished.run.cells[0].experiment),
    }


def _spreads(scores: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Of every number that some seed has."""
    keys = dict.fromkeys(key for of_seed in scores for key in of_seed)
    spreads = {key: spread([of_seed[key] for of_seed in scores if key in of_seed]) for key in keys}
    return {key: over for key, over in spreads.items() if over is not None}


def _remarks(cells: Sequence[Scores]) -> list[str]:
    """What the cells' own reports warn of, for the clients of all seeds together."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for cell in cells:
        for text, pair in cell.alarms.items():
            counts.setdefault(text, []).append(pair)
    of = f" over {len(cells)} seeds" * (len(cells) > 1)
    everybody = sum(len(cell.clients) for cell in cells)
    unscored = everybody - sum(len(cell.known) for cell in cells)
    missing = f"{unscored} of {everybody} clients{of} ended without a score, and no mean has them."
    return [missing] * (unscored > 0) + [
        alarm_text(text, sum(few for few, _ in pairs), sum(total for _, total in pairs), of)
        for text, pairs in counts.items()
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _curve(cells: Sequence[Scores]) -> list[ScoredRound]:
    """Mean over seeds at every round that all of them scored."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for cell in cells:
        for point in cell.curve:
            if point["mean"] is not None:
                by_round.setdefault(point["round"], []).append(point)
    return [
        {
            "round": at,
            "mean": statistics.fmean(point["mean"] for point in points),
            "bytes_up": statistics.fmean(point["bytes_up"] for point in points),
            "bytes_down": statistics.fmean(point["bytes_down"] for point in points),
        }
        for at, points in sorted(by_round.items())
        if len(points) == len(cells)
    ]


def _against(run: FinishedRun, reference: FinishedRun) -> Against | None:
    """Differences from the reference, paired by seed and client; None where no seed has the same clients and data."""
    by_seed: list[list[float]] = []
    for cell, other in _pairs(run, reference):
        clients = [client for client in cell.known if client in other.known]
        if clients:
            by_seed.append([cell.known[client] - other.known[client] for client in clients])
    test = paired([statistics.fmean(differences) for differences in by_seed])
    if test is None:
        return None
    signed = signed_ranks([value for differences in by_seed for value in differences])
    tested = {cell.tested for cell, _ in _pairs(run, reference)}
    same = len(tested) == 1 and None not in tested
    return {"t": test, "signed": signed, "examples": by_example(_each_of_both(run, reference), same)}


def _each_of_both(run: FinishedRun, reference: FinishedRun) -> list[dict[str, Pair]]:
    """By seed, every client's scores of single examples in both runs; nothing where one of them has none."""
    pairs = [
        {client: (_each(cell, client), _each(other, client)) for client in cell.known if client in other.known}
        for cell, other in _pairs(run, reference)
    ]
    return pairs if all(first and second for seed in pairs for first, second in seed.values()) else []


def _pairs(run: FinishedRun, reference: FinishedRun) -> list[tuple[Scores, Scores]]:
    """The seeds that both have; none at all where any seed has other clients or data."""
    by_seed = {cell.seed: cell for cell in reference.cells}
    pairs = [(cell, by_seed[cell.seed]) for cell in run.cells if cell.seed in by_seed]
    same = all(cell.data == other.data and cell.clients.keys() == other.clients.keys() for cell, other in pairs)
    return pairs if same else []


def _each(cell: Scores, client: str) -> Any:
    return (cell.rows.get(client) or {}).get("each")


def _beside_against(run: FinishedRun, reference: FinishedRun) -> dict[str, TTest]:
    """Of the scores beside the mean, the differences of seeds from the reference, as a paired test: of newcomers over
    those that both have a score for."""
    pairs = _pairs(run, reference)
    differences = {
        key: [
            cell.beside[key] - other.beside[key] for cell, other in pairs if key in cell.beside and key in other.beside
        ]
        for key in COMPARED
    }
    both = (mean_difference(_of_newcomers(cell), _of_newcomers(other)) for cell, other in pairs)
    differences["newcomers"] = [difference for difference in both if difference is not None]
    tests = {key: paired(values) for key, values in differences.items()}
    return {key: test for key, test in tests.items() if test is not None}


def _of_newcomers(cell: Scores) -> dict[str, float | None]:
    return {newcomer: score_of(row, cell.metric) for newcomer, row in cell.newcomers.items()}


def _grid(table: GridTable) -> GridResults:
    def laid_out(values: Mapping[tuple[int, int], Any]) -> list[list[Any]]:
        return [[values.get((i, j)) for j in range(len(table.columns))] for i in range(len(table.rows))]

    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "corner": table.corner,
        "rows": [list(labels) for labels in table.rows],
        "columns": [list(labels) for labels in table.columns],
        "runs": laid_out(table.runs),
        "reasons": laid_out(table.reasons),
        "paper": laid_out(table.paper),
    }


def verdict(against: Against | None, level: float) -> str:
    """The conclusion from the test over seeds, after Holm's correction."""
    if against is None:
        return UNPAIRED
    t = against["t"]
    p = t.get("p_holm")
    if t["n"] < 2:
        return "one seed"
    if p is None:
        return CONSTANT
    if p >= level:
        return "no difference shown"
    return "better" if t["mean"] > 0 else "worse"


def unpaired(results: Comparison, run: RunScores) -> str:
    """Why a run has no test against the reference."""
    reference = next(other for other in results["runs"] if other["label"] == results["reference"])
    if empty := [other["label"] for other in (reference, run) if not other["mean"]]:
        return f"{empty[0]} has no results"
    if not {seed["seed"] for seed in reference["seeds"]} & {seed["seed"] for seed in run["seeds"]}:
        return "no seed in common"
    return UNPAIRED


def sentences(results: Comparison) -> list[str]:
    """What the comparison shows and cannot show, the most important first."""
    reference, level = results["reference"], results["level"]
    means = {run["label"]: run["mean"] for run in results["runs"] if run["mean"]}
    if not means:
        return ["No run has a score."]
    lines = [_highest(results, means)]
    if (limit := limit_sentence(limit_of(results))) is not None:
        lines.insert(0, limit)
    others = [run for run in results["runs"] if run["mean"] and run["label"] != reference]
    verdicts = {
        run["label"]: verdict(run["against"], level) if run["against"] else unpaired(results, run) for run in others
    }
    for word in ("better", "worse"):
        if labels := [label for label, reading in verdicts.items() if reading == word]:
            lines.append(
                f"{word.capitalize()} than {reference}: {listing(labels)} (p < {level:g} over seeds, after Holm's "
                "correction)."
            )
    untested = [verdicts[run["label"]] for run in others if run["against"] is None]
    for reading in dict.fromkeys((CONSTANT, *untested)):
        if labels := [label for label, found in verdicts.items() if found == reading]:
            lines.append(f"Not tested against {reference}: {listing(labels)} ({reading}).")
    by_remark: dict[str, list[str]] = {}
    for run in results["runs"]:
        for remark in run["remarks"]:
            by_remark.setdefault(remark, []).append(run["label"])
    lines += [f"{listing(labels)}: {remark}" for remark, labels in by_remark.items()]
    if unclear := sum(reading == "no difference shown" for reading in verdicts.values()):
        lines.append(f"No difference from {reference} is shown for {count_text(unclear, 'run')}.")
    if claims := results["claims"]:
        words = {word: sum(claim["verdict"] == word for claim in claims) for word in ("shown", "refuted", "undecided")}
        counted = ", ".join(f"{count} {word}" for word, count in words.items())
        lines.append(f"Of {count_text(len(claims), 'claim')}: {counted}.")
    if (chosen := results["chosen"]) is not None:
        seeds = listing([str(seed) for seed in chosen["seeds"]])
        lines.append(
            f"Settings were chosen on validation examples of seeds {seeds}: {chosen['file']}, sha256 "
            f"{chosen['sha256'][:12]}"
            + (f"; the command changed {listing(chosen['changed'])}." if chosen["changed"] else ".")
        )
    lines += _limits(results, len(verdicts))
    if results["failures"]:
        lines.append(f"Without results, and missing here: {count_text(len(results['failures']), 'cell')}.")
    return lines


def _highest(results: Comparison, means: Mapping[str, Spread]) -> str:
    """The run with the highest mean over the seeds that all runs have a score for."""
    metric = results["metric"]
    by_seed = {
        run["label"]: {seed["seed"]: seed["mean"] for seed in run["seeds"] if seed["mean"] is not None}
        for run in results["runs"]
        if run["label"] in means
    }
    common = sorted(set.intersection(*map(set, by_seed.values())))
    if not common:
        return "The runs have no seed in common, so their means are not compared."
    over = f" over {count_text(len(common), 'seed')}" if len(common) > 1 else ""
    if len(common) < max(map(len, by_seed.values())):  # a cell failed, or a candidate was stopped
        over = f" over {count_text(len(common), 'seed')} that all runs have"
    spreads = {label: spread([scores[seed] for seed in common]) for label, scores in by_seed.items()}
    known = {label: over_seeds for label, over_seeds in spreads.items() if over_seeds is not None}
    best = max(known, key=lambda label: known[label]["mean"])
    shown = {label: score_text(mean["mean"], metric) for label, mean in known.items()}
    tied = [label for label in known if shown[label] == shown[best]]
    highest = f"Highest mean {metric.replace('_', ' ')}"
    if len(tied) > 1:  # equal in the digits that are shown, so no run is named as the best
        return f"{highest}, a tie of {count_text(len(tied), 'run')} ({listing(tied)}): {shown[best]}{over}."
    return f"{highest}: {best}, {mean_cell(known[best], metric)}{over}."


def limit_of(results: Comparison) -> dict[str, Any]:
    """The limit of the runs' data and rounds, of the first run that has one; empty without."""
    limits = (run["config"].get("limit") or {} for run in results["runs"])
    return next((dict(limit) for limit in limits if limit_sentence(limit) is not None), {})


def _limits(results: Comparison, comparisons: int) -> list[str]:
    """How much these seeds and clients can show at all."""
    compared = {run["label"]: run["against"] for run in results["runs"] if run["against"]}
    if not compared:
        return []
    single = [label for label, against in compared.items() if against["t"]["n"] < 2]
    n = min((against["t"]["n"] for against in compared.values() if against["t"]["n"] > 1), default=1)
    pairs = min(against["signed"]["n"] for against in compared.values())
    lines = []
    if len(single) == len(compared):
        lines.append("With one seed there is no spread, and nothing follows about which method is better.")
    elif single:
        lines.append(f"{listing(single)}: one seed, of which nothing follows.")
    if 1 < n < FEW_SEEDS:
        lines.append(
            f"{n} seeds are few: a mean difference has to be {reach(n, results['level']):.1f} times its own standard "
            "deviation over seeds before a single test finds it"
            + (f", and more after correcting for {comparisons} comparisons." if comparisons > 1 else ".")
        )
    if pairs < LEAST_PAIRS:
        lines.append(
            f"{count_text(pairs, 'pair')} of clients and seeds are too few for a signed-rank test "
            f"({LEAST_PAIRS} at least)."
        )
    return lines
