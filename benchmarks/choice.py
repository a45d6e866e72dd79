"""Write the tables over all suites of docs/choice.md: does a choice at every site lose less, and gain, beside training
alone?

    befit compare studies/choice/digits.yaml --out OUT/choice-digits      # and the others
    python benchmarks/study_results.py OUT/choice-digits …
    python benchmarks/choice.py

It reads the cells that `study_results.py` has kept.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from befit.report.table import Cell, Table, decimals, markdown
from befit.studies.compare.statistics import LEVEL
from common import HERE, RESULTS, put_section
from when import ALONE, Gain, Place, gain_text, gains

PAGE = HERE.parent / "docs" / "choice.md"
SUITES = [path.stem for path in sorted((HERE.parent / "studies" / "choice").glob("*.yaml"))]
CHOICE = "Choice"
Rows = Mapping[str, Mapping[int, Mapping[str, dict[str, Any]]]]  # by run, seed and client, what a run says of it


def main() -> None:
    suites = {suite: read(suite) for suite in SUITES}
    put_section(PAGE, "choice", section(suites))


def read(suite: str) -> Rows:
    """The rows of all clients in the cells that were kept, by run in the study's order."""
    labels = [run["label"] for run in json.loads((RESULTS / f"choice_{suite}.json").read_text())["runs"]]
    rows: dict[str, dict[int, dict[str, dict[str, Any]]]] = {label: {} for label in labels}
    with gzip.open(RESULTS / f"choice_{suite}.cells.jsonl.gz", "rt") as file:
        for cell in map(json.loads, file):
            scores = cell["scores"]
            of_run = {client: {**row, "score": row[scores["metric"]]} for client, row in scores["rows"].items()}
            rows[cell["label"]][scores["seed"]] = of_run
    return rows


def section(suites: Mapping[str, Rows]) -> str:
    """Gains over training alone, sites that lose, and who took what."""
    runs = list(next(iter(suites.values())))
    others = [run for run in runs if run != ALONE]
    found = gains({run: {(suite, ""): _scores(rows[run]) for suite, rows in suites.items()} for run in runs})
    seeds = {suite: len(rows[ALONE]) for suite, rows in suites.items()}
    parts = [
        f"Points over {ALONE}, in the mean over sites and seeds; ± is half of the 95 % interval, ✓ what is shown to be "
        "above or below it (paired t test over seeds, p < 0.05 after Holm's correction for all differences of this "
        "table).",
        markdown(_gain_table(suites, others, found, seeds)),
        f"Share of sites that are more than a point below {ALONE}, over all seeds; in brackets those whose own test "
        "examples show that they are below (sign test of paired examples, one-sided at 2.5 %, so that chance "
        "alone gives 2.5 % at most).",
        markdown(_losing_table(suites, others, found)),
        "What the sites took, in shares of all sites and seeds:",
        markdown(_taken_table(suites)),
    ]
    return "\n\n".join(parts)


def _scores(seeds: Mapping[int, Mapping[str, dict[str, Any]]]) -> dict[int, dict[str, float]]:
    return {seed: {client: row["score"] for client, row in rows.items()} for seed, rows in seeds.items()}


def _gain_table(
    suites: Mapping[str, Rows],
    others: Sequence[str],
    found: Mapping[str, Mapping[Place, Gain]],
    seeds: Mapping[str, int],
) -> Table:
    lines: list[list[Cell | str]] = []
    for suite, rows in suites.items():
        clients = list(rows[ALONE].values())
        alone = statistics.fmean(statistics.fmean(row["score"] for row in of_seed.values()) for of_seed in clients)
        tests = statistics.fmean(row["examples"] for of_seed in clients for row in of_seed.values())
        texts = [gain_text(found[run][suite, ""]) for run in others]
        numbers = [Cell(seeds[suite], decimals(0)), Cell(tests, decimals(0)), Cell(alone * 100, decimals(1))]
        lines.append([suite, *numbers, *texts])
    return Table("Gains", ["suite", "seeds", "test examples a site", ALONE, *others], lines)


def _losing_table(
    suites: Mapping[str, Rows], others: Sequence[str], found: Mapping[str, Mapping[Place, Gain]]
) -> Table:
    lines = [
        [suite, *(f"{found[run][suite, ''].losing:.0%} ({losing(rows[run], rows[ALONE]):.0%})" for run in others)]
        for suite, rows in suites.items()
    ]
    return Table("Sites that lose", ["suite", *others], lines)


def losing(
    mine: Mapping[int, Mapping[str, dict[str, Any]]], alone: Mapping[int, Mapping[str, dict[str, Any]]]
) -> float:
    """The share of sites whose own test examples show that they are below training alone."""
    pairs = [(mine[seed][client], row) for seed, rows in alone.items() for client, row in rows.items()]
    return statistics.fmean(_is_below(one, other) for one, other in pairs)


def _is_below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Sign test over the examples of which one of two models is right, one-sided at 2.5 % as an interval's end."""
    singles = [float(mine) - float(theirs) for mine, theirs in zip(one["each"], other["each"], strict=True)]
    worse, better = sum(single < 0 for single in singles), sum(single > 0 for single in singles)
    if not worse:
        return False
    return float(stats.binomtest(worse, worse + better, alternative="greater").pvalue) < LEVEL / 2


def _taken_table(suites: Mapping[str, Rows]) -> Table:
    taken = {
        suite: Counter(row["deployed"] for of_seed in rows[CHOICE].values() for row in of_seed.values())
        for suite, rows in suites.items()
    }
    members = list(dict.fromkeys(name for counts in taken.values() for name in sorted(counts)))
    lines = [[suite, *(f"{counts[name] / counts.total():.0%}" for name in members)] for suite, counts in taken.items()]
    return Table("Taken", ["suite", *members], lines)


if __name__ == "__main__":
    main()
