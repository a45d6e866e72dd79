"""The tables of a comparison: each is made here once, for the terminal, Markdown, HTML and LaTeX alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from befit.core.metrics import LOWER_IS_BETTER, Spread
from befit.data.limit import limit_sentence
from befit.report.numbers import count_text, is_share, listing
from befit.report.results import split_name
from befit.report.table import BYTES, P_VALUE, SECONDS, Cell, Table, decimals, deviation, difference, mean_cell
from befit.report.tables import diagnostics_note
from befit.studies.compare.beside import GROUPS, ScoresTable
from befit.studies.compare.other_metrics import UNPARSABLE
from befit.studies.compare.results import Comparison, GridResults, OtherMetrics, RunScores, TTest, Verdict
from befit.studies.compare.statistics import LEAST_PAIRS, holm, mean_difference, paired
from befit.studies.compare.summary import limit_of, unpaired, verdict
from befit.studies.compare.wins_tables import budget_tables, wins_tables

_COST_NOTE = (
    "Means over seeds; bytes of training as encoded for the wire, all clients together (1 MB = 1e6 bytes); steps are "
    "mini-batches of one client over all stages. Processor time is that of all clients' training, without scoring; at "
    "the server it is that of downloads and aggregation, and of what comes before the first round."
)
_BESIDE_NOTE = "Differences are paired by seed, with half their 95 % interval (t); p is Holm's for the table's runs."
_UNPARSABLE_NOTE = f"{UNPARSABLE}: the share of answers that name none of the choices; lower is better."
WIDE = 8  # clients are in columns where they are no more than this, and runs are more


def all_tables(results: Comparison) -> list[Table]:
    """Grids first, in the paper's form, and who wins at which budget, then every run and what was scored beside it.

    What the terminal leaves out, being long, are the tables marked as details.
    """
    wins = wins_tables(results, basis_note(results))
    tables = [
        *(grid_table(results, grid) for grid in results["tables"]),
        *budget_tables(results, basis_note(results)),
        *(table for table in wins if not table.detail),
        *([claims_table(results)] if results["claims"] else []),
        summary_table(results),
        *([difference_table(results)] if len(results["runs"]) > 1 else []),
        *other_tables(results),
        *beside_tables(results),
        diagnostics_table(results),
        cost_table(results),
        *(table for table in wins if table.detail),
        client_table(results),
    ]
    return [table for table in tables if table]


def basis_note(results: Comparison, bold: bool = False, metric: str = "") -> str:
    """A sentence on the numbers of a table, with a warning where they are of a trial."""
    metric = (metric or results["metric"]).replace("_", " ")
    counts = [len(run["seeds"]) for run in results["runs"]]
    fewest, most = (min(counts), max(counts)) if counts else (0, 0)
    several = f"{most}" if fewest == most else f"up to {most}"
    seeds = f"mean ± SD over {several} seeds (n - 1)" if most > 1 else "one seed"
    note = f"{metric[:1].upper()}{metric[1:]}, {seeds}."
    if bold and most > 1:
        level = f"{results['level']:g}"
        note += f" Bold: above every other (paired t tests over seeds, p < {level} after Holm's correction)."
    trial = " Of a trial on part of the whole: it means nothing."
    return note + trial * (limit_sentence(limit_of(results)) is not None)


def grid_table(results: Comparison, grid: GridResults) -> Table:
    """A run in every cell, and the paper's number in brackets where there is one; bold where it is shown to be best."""
    by_label = {run["label"]: run for run in results["runs"]}
    best = _best([by_label[label] for row in grid["runs"] for label in row if label], results["level"])
    rows = []
    for labels, runs, papers in zip(grid["rows"], grid["runs"], grid["paper"], strict=True):
        means = [None if label is None else by_label[label]["mean"] for label in runs]
        notes = ["" if paper is None else f"[{paper:.2f}]" for paper in papers]
        cells = [
            mean_cell(mean, results["metric"], label in best, note)
            for mean, label, note in zip(means, runs, notes, strict=True)
        ]
        rows.append([", ".join(labels), *cells])
    headers = [grid["corner"], *(tuple(labels) for labels in grid["columns"])]
    return Table(grid["title"], headers, rows, _grid_note(results, grid))


def _grid_note(results: Comparison, grid: GridResults) -> str:
    parts = [grid["note"], basis_note(results, bold=True)]
    if any(number is not None for row in grid["paper"] for number in row):
        parts.append(f"In brackets: the paper's numbers{_source(results)}. {results['note']}".strip())
    reasons: dict[str, list[str]] = {}
    for row, labels in zip(grid["reasons"], grid["rows"], strict=True):
        for reason, column in zip(row, grid["columns"], strict=True):
            if reason:
                reasons.setdefault(reason, []).append(f"{', '.join(labels)} / {', '.join(column)}")
    parts += [f"Left out: {'; '.join(cells)}: {reason}." for reason, cells in reasons.items()]
    return " ".join(filter(None, parts))


_OF = {"mean": "", "worst": "worst client", "others": "others' examples", "newcomers": "newcomers"}


def claims_table(results: Comparison) -> Table:
    """Every claim with its contrasts, a row each."""
    rows = []
    for claim in results["claims"]:
        for number, contrast in enumerate(claim["contrasts"]):
            first = number == 0
            rows.append(
                [
                    claim["name"] if first else "",
                    contrast_text(contrast["weights"]),
                    measured(claim),
                    Cell(contrast["spread"]["mean"], difference(results["metric"])) if contrast["spread"] else None,
                    _interval(contrast["low"], contrast["high"], results["metric"]),
                    f"{claim['by']:g}",
                    claim["verdict"] if first else "",
                ]
            )
    headers = ["claim", "contrast", "of", "mean", "95 % interval", "margin", "verdict"]
    says = " ".join(f"{claim['name']}: {claim['says']}{_made_in(claim['source'])}." for claim in results["claims"])
    note = (
        "Contrasts over seeds. Shown: above the margin; refuted: below it; one-sided t tests at 2.5 %, adjusted by "
        f"Holm's method for all claims. {says}"
    )
    table = Table("Claims", headers, rows, note)
    return table if any(table.column("of")) else table.without("of")


def measured(claim: Verdict) -> str:
    """What a claim is about, where it is not the mean over clients as deployed."""
    return ", ".join(filter(None, (_OF[claim["of"]], "" if claim["at"] is None else f"r = {claim['at']}")))


def _made_in(source: str) -> str:
    return f" ({source})" if source else ""


def contrast_text(weights: Mapping[str, float]) -> str:
    """
    >>> contrast_text({"A": 1.0, "B": -1.0}), contrast_text({"A": 0.5, "B": -1.0, "C": 0.5})
    ('A - B', '0.5 A - B + 0.5 C')
    """
    text = ""
    for label, weight in weights.items():
        size = "" if abs(weight) == 1 else f"{abs(weight):g} "
        sign = ("-" if weight < 0 else "") if not text else (" - " if weight < 0 else " + ")
        text += f"{sign}{size}{label}"
    return text


def _interval(low: float | None, high: float | None, metric: str) -> str | None:
    if low is None or high is None:
        return None
    return f"{100 * low:+.1f} to {100 * high:+.1f}" if is_share(metric) else f"{low:+.4g} to {high:+.4g}"


def _source(results: Comparison) -> str:
    parts = [part for part in (results["paper"], results["table"]) if part]
    return f" ({', '.join(parts)})" if parts else ""


def summary_table(results: Comparison) -> Table:
    """Per run: mean over seeds of the mean over clients, the worst client, wins, and the paper's number.

    How many seeds a run has is shown where any lacks one.
    """
    metric, runs, reference = results["metric"], results["runs"], results["reference"]
    several, best = len(runs) > 1, _best(runs, results["level"])
    papers = any(run["paper"] is not None for run in runs)
    partly = any(len(run["seeds"]) < len(results["seeds"]) for run in runs)
    headers = ["run", f"mean {metric.replace('_', ' ')}", "worst client", *["seeds"] * partly]
    headers += ["clients better / same / worse"] * several + ["up", "down"] + ["paper"] * papers
    rows = []
    for run in runs:
        signed = run["against"]["signed"] if run["against"] else None
        differs = run["label"] != reference and verdict(run["against"], results["level"]) in ("better", "worse")
        rows.append(
            [
                run["label"],
                mean_cell(run["mean"], metric, run["label"] in best, "*" * differs),
                mean_cell(run["worst"], metric),
                *[len(run["seeds"])] * partly,
                *[f"{signed['better']}/{signed['ties']}/{signed['worse']}" if signed else None] * several,
                Cell(run["bytes_up"], BYTES),
                Cell(run["bytes_down"], BYTES),
                *[Cell(run["paper"], decimals(2))] * papers,
            ]
        )
    note = (
        f"{basis_note(results, bold=True)} Mean over seeds of the mean over clients, on {split_name(results)} "
        f"examples. Worst client: the lowest of each seed, mean over seeds."
    )
    if several:
        note += (
            f" Better, same and worse than {reference}: clients of all seeds together. *: differs from {reference} "
            f"(paired t test over seeds, p < {results['level']:g} after Holm's correction)."
        )
    if papers:
        source = _source(results).strip(" ()")
        note += f"{f' Paper: {source}.' if source else ''} {results['note']}"
    return Table("All runs", headers, rows, note.strip())


_BY_EXAMPLES_NOTE = (
    " ± by examples: half of the 95 % interval that the choice of test examples alone gives the difference, paired by "
    "example, as if no two seeds tested on the same ones, unless all do; where it is nearly all of the first ±, larger "
    "test sets would help, where it is little of it, more seeds."
)


def difference_cell(test: TTest, metric: str) -> Cell:
    """A mean difference, with half of its 95 % interval where there is one."""
    half = None if test["high"] is None else test["high"] - test["mean"]
    return Cell(test["mean"], difference(metric), half)


def difference_table(results: Comparison) -> Table:
    """Per run: mean difference from the reference with half its interval, both tests, and what follows."""
    rows = []
    judged = any(run["against"] and run["against"]["examples"] for run in results["runs"])
    for run in results["runs"]:
        if run["label"] == results["reference"]:
            continue
        if run["against"] is None:
            rows.append([run["label"], *[None] * (3 + judged), unpaired(results, run)])
            continue
        t, signed, examples = run["against"]["t"], run["against"]["signed"], run["against"]["examples"]
        half = [Cell(examples["half"] if examples else None, deviation(results["metric"]))] * judged
        tests = (Cell(test.get("p_holm"), P_VALUE) for test in (t, signed))
        follows = verdict(run["against"], results["level"])
        rows.append([run["label"], difference_cell(t, results["metric"]), *half, *tests, follows])
    headers = [
        "run",
        "difference ± 95%",
        *["± by examples"] * judged,
        "p (t, seeds)",
        "p (Wilcoxon, clients)",
        "what follows",
    ]
    return Table(f"Differences from {results['reference']}", headers, rows, _difference_note(results))


def _difference_note(results: Comparison) -> str:
    compared = [run["against"] for run in results["runs"] if run["against"]]
    seeds = max((against["t"]["n"] for against in compared), default=0)
    counts = [sum(against[key]["p"] is not None for against in compared) for key in ("t", "signed")]
    unit = "In points. " if is_share(results["metric"]) else ""
    return (
        f"{unit}p (t, seeds): paired t test of the seeds' means over clients, n = {seeds}; what follows is taken from "
        f"it at {results['level']:g}. p (Wilcoxon, clients): signed ranks over clients x seeds, not done below "
        f"{LEAST_PAIRS} that differ; clients of one seed share a model, so it takes them for more evidence than they "
        "are. Both are "
        f"adjusted by Holm's method, for {count_text(counts[0], 't test')} and {counts[1]} of ranks; "
        "the interval is not." + _BY_EXAMPLES_NOTE * any(against["examples"] for against in compared)
    )


def other_tables(results: Comparison) -> list[Table]:
    """A row for each run, a column for each metric beside the headline; newcomers apart."""
    tables = []
    for other in results["other_metrics"]:
        who, metrics = other["pool"], other["metrics"]
        rows = [
            [label, *(mean_cell(run["scores"][name], name) for name in metrics)] for label, run in other["runs"].items()
        ]
        note = (
            f"{basis_note(results, metric='Metrics beside ' + results['metric'])} Mean over {who} on "
            f"{split_name(results)} examples. {_UNPARSABLE_NOTE * (UNPARSABLE in metrics)}"
        )
        note += "".join(f" {name}: lower is better." for name in metrics if name in LOWER_IS_BETTER)
        if lacking := _lacking(other):
            note += f" Clients without a metric are left out of its mean: {lacking}."
        title = "Other metrics" + ", newcomers" * (who == "newcomers")
        tables.append(Table(title, ["run", *metrics], rows, note.strip()))
    return tables


def _lacking(other: OtherMetrics) -> str:
    """Of which metrics some clients have no score, and of the run with the most of them, how many."""
    parts = []
    for name in other["metrics"]:
        counts = {
            label: sum(row[name] is None for seed in run["seeds"] for row in seed["clients"].values())
            for label, run in other["runs"].items()
        }
        worst = max(counts, key=lambda label: counts[label])
        if counts[worst]:
            seeds = other["runs"][worst]["seeds"]
            of = f" over {len(seeds)} seeds" * (len(seeds) > 1)
            parts.append(f"{name}, {counts[worst]} of {sum(len(seed['clients']) for seed in seeds)}{of} with {worst}")
    return listing(parts)


def beside_tables(results: Comparison) -> list[Table]:
    """Scores over time and on other clients' examples, and those of newcomers, where some run has them."""
    tables = (_beside_table(results, group) for group in GROUPS)
    return [table for table in tables if table is not None]


def _beside_table(results: Comparison, group: ScoresTable) -> Table | None:
    metric, runs = results["metric"], results["runs"]
    present = [key for key in group.columns if any(key in run["beside"] for run in runs)]
    if group.compared not in present:
        return None
    if all(run["beside"].get("others_auc") == run["beside"].get("others_last") for run in runs):
        present = [key for key in present if key != "others_auc"]  # measured once: there is no time to average over
    several = len(runs) > 1
    headers = ["run", *(group.columns[key] for key in present)]
    headers += [f"{group.columns[group.compared]}: minus {results['reference']} ± 95%", "p (t, seeds)"] * several
    rows = []
    for run in runs:
        test = run["beside_against"].get(group.compared)
        tested = [difference_cell(test, metric), Cell(test.get("p_holm"), P_VALUE)] if test else [None, None]
        scores = (mean_cell(run["beside"].get(key), metric) for key in present)
        rows.append([run["label"], *scores, *tested * several])
    return Table(group.title, headers, rows, f"{group.note} {basis_note(results)} {_BESIDE_NOTE}")


def diagnostics_table(results: Comparison) -> Table:
    """A row for each run whose clients report numbers that its method names, a column for each of those; the runs that
    their own reports warn of are marked."""
    runs = [run for run in results["runs"] if run["diagnostics"]]
    keys = list(dict.fromkeys(key for run in runs for key in run["diagnostics"]))
    rows = [
        [run["label"] + " !" * bool(run["remarks"]), *(_mean_alone(run["diagnostics"].get(key)) for key in keys)]
        for run in runs
    ]
    note = "What clients report of their training, as its method names it: means over clients, then over seeds. "
    note += f"{diagnostics_note([run['method'] for run in runs])} "
    remarks = list(dict.fromkeys(remark for run in runs for remark in run["remarks"]))
    note += " ".join([*["!:"] * bool(remarks), *remarks])
    return Table("Diagnostics", ["run", *keys], rows, note.strip())


def _mean_alone(over: Spread | None) -> Cell:
    return Cell(None if over is None else over["mean"])


def cost_table(results: Comparison) -> Table:
    rows = [
        [
            run["label"],
            Cell(run["steps"], decimals(0)),
            Cell(run["bytes_up"], BYTES),
            Cell(run["bytes_down"], BYTES),
            Cell(run["cpu_seconds"], SECONDS),
            Cell(run["server_cpu_seconds"], SECONDS),
        ]
        for run in results["runs"]
    ]
    return Table("Cost", ["run", "steps per client", "up", "down", "processor time", "at the server"], rows, _COST_NOTE)


def client_table(results: Comparison) -> Table:
    """Every client's score, clients in rows, or in columns where they are few and runs are many."""
    runs, clients = results["runs"], clients_of(results)

    def cell(run: RunScores, client: str) -> Cell:
        return mean_cell(run["clients"].get(client), results["metric"])

    if len(runs) > WIDE >= len(clients):
        headers, rows = ["run", *clients], [[run["label"], *(cell(run, name) for name in clients)] for run in runs]
    else:
        headers = ["client", *(run["label"] for run in runs)]
        rows = [[name, *(cell(run, name) for run in runs)] for name in clients]
    data = {cell["seed"]: cell["tested"] for run in runs for cell in run["seeds"]}
    anew = " Each seed divides the data anew: a client of one name has other examples in each."
    return Table("Clients", headers, rows, f"{basis_note(results)}{anew * (len(set(data.values())) > 1)}", detail=True)


def clients_of(results: Comparison) -> list[str]:
    return list(dict.fromkeys(client for run in results["runs"] for client in run["clients"]))


def failure_table(results: Comparison) -> Table:
    rows = [[failure["run"], str(failure["seed"]), failure["error"]] for failure in results["failures"]]
    return Table("Failed", ["run", "seed", "what happened"], rows)


def _best(runs: Sequence[RunScores], level: float) -> set[str]:
    """The label of the run with the highest mean, where it is shown to be above every other one; else none.

    Paired t tests over seeds, with Holm's correction for all others, of the clients that both runs have a score for.
    Runs of other seeds or data than its own show nothing.
    """
    means = {run["label"]: run["mean"]["mean"] for run in runs if run["mean"]}
    if len(means) < 2:
        return set()
    scores = {run["label"]: {(seed["seed"], seed["data"]): seed["clients"] for seed in run["seeds"]} for run in runs}
    best = max(means, key=lambda label: means[label])
    tests: dict[str, float | None] = {}
    for label in means.keys() - {best}:
        both = [(clients, scores[label].get(key, {})) for key, clients in scores[best].items()]
        test = paired([value for mine, theirs in both if (value := mean_difference(mine, theirs)) is not None])
        tests[label] = test["p"] if test and test["mean"] > 0 else None  # the means may be over other seeds or clients
    return {best} if all(p is not None and p < level for p in holm(tests).values()) else set()
