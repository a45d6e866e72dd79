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
CHOICE, MARGIN = "Choice", "Choice, margin 0.1"
Rows = Mapping[str, Mapping[int, Mapping[str, dict[str, Any]]]]  # by run, seed and client, what a run says of it


def main() -> None:
    suites = {suite: read(suite) for suite in SUITES}
    put_section(PAGE, "choice", section({suite: without(MARGIN, rows) for suite, rows in suites.items()}))
    put_section(PAGE, "margin", margin_section(suites))


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
    scores = {run: {(suite, ""): _scores(rows[run]) for suite, rows in suites.items()} for run in runs}
    found = gains(scores)
    beside = gains({run: scores[run] for run in runs if run != ALONE}, reference=CHOICE)
    seeds = {suite: len(rows[ALONE]) for suite, rows in suites.items()}
    parts = [
        f"Points over {ALONE}, in the mean over sites and seeds. ± is half of the 95 % interval. ✓ marks what is shown "
        f"to be above or below {ALONE} (paired t test over seeds, p < 0.05 after Holm's correction for all differences "
        "of this table).",
        markdown(_gain_table(suites, others, found, seeds)),
        f"Points over {CHOICE}, with Holm's correction for all differences of this table. Here and above, ± itself is "
        "not corrected.",
        markdown(_beside_table(runs, beside)),
        f"Share of sites more than a point below {ALONE}, over all seeds. In brackets: how many sites' own test "
        "examples show that they are below (sign test of paired examples, one-sided at 2.5 %, not corrected for the "
        "number of sites), and how many chance alone would give if no model differed.",
        markdown(_losing_table(suites, others, found)),
        "What the sites took, in shares of all sites and seeds:",
        markdown(_taken_table(suites)),
    ]
    return "\n\n".join(parts)


def without(run: str, rows: Rows) -> Rows:
    return {label: of_run for label, of_run in rows.items() if label != run}


def margin_section(suites: Mapping[str, Rows]) -> str:
    """What the choice gives whose margin keeps more sites alone, beside the choice of the least loss."""
    scores = {
        run: {(suite, ""): _scores(rows[run]) for suite, rows in suites.items()} for run in (ALONE, CHOICE, MARGIN)
    }
    over_alone = gains({run: scores[run] for run in (ALONE, MARGIN)})[MARGIN]
    over_choice = gains({run: scores[run] for run in (CHOICE, MARGIN)}, reference=CHOICE)[MARGIN]
    lines: list[list[Cell | str]] = []
    for suite, rows in suites.items():
        below, chance = losing(rows[MARGIN], rows[ALONE])
        taken = [row["deployed"] for of_seed in rows[MARGIN].values() for row in of_seed.values()]
        share = 100 * over_alone[suite, ""].losing
        alone = 100 * taken.count(ALONE.lower()) / len(taken)
        texts = [gain_text(over_alone[suite, ""]), gain_text(over_choice[suite, ""])]
        lines.append([suite, *texts, f"{share:.1f}% ({below} / {chance:.1f})", f"{alone:.1f}%"])
    head = ["suite", f"over {ALONE}", f"over {CHOICE}", "sites that lose", f"take {ALONE}"]
    return "\n\n".join(
        [
            f"{MARGIN}: points over {ALONE} and over {CHOICE}, each with Holm's correction for the {len(lines)} "
            f"differences of its column. The other two columns are as in the tables above.",
            markdown(Table("Margin", head, lines)),
        ]
    )


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


def _beside_table(runs: Sequence[str], beside: Mapping[str, Mapping[Place, Gain]]) -> Table:
    others = [run for run in runs if run not in (ALONE, CHOICE)]
    lines = [[suite, *(gain_text(beside[run][suite, ""]) for run in others)] for suite in SUITES]
    return Table("Beside the choice", ["suite", *others], lines)


def _losing_table(
    suites: Mapping[str, Rows], others: Sequence[str], found: Mapping[str, Mapping[Place, Gain]]
) -> Table:
    lines: list[list[Cell | str]] = []
    for suite, rows in suites.items():
        tests = {run: losing(rows[run], rows[ALONE]) for run in others}
        lines.append(
            [
                suite,
                *(
                    f"{100 * found[run][suite, ''].losing:.1f}% ({tests[run][0]} / {tests[run][1]:.1f})"
                    for run in others
                ),
            ]
        )
    return Table("Sites that lose", ["suite", *others], lines)


def losing(
    mine: Mapping[int, Mapping[str, dict[str, Any]]], alone: Mapping[int, Mapping[str, dict[str, Any]]]
) -> tuple[int, float]:
    """How many sites' own test examples show that they are below training alone, and how many would by chance."""
    pairs = [(mine[seed][client], row) for seed, rows in alone.items() for client, row in rows.items()]
    tests = [_sign_test(one, other) for one, other in pairs]
    return sum(below for below, _ in tests), sum(chance for _, chance in tests)


def _sign_test(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether the examples that one of two models alone has right show that the first is below (one-sided at 2.5 %, as
    an interval's end), and the probability of that if the two did not differ."""
    singles = [float(mine) - float(theirs) for mine, theirs in zip(one["each"], other["each"], strict=True)]
    worse, different = sum(single < 0 for single in singles), sum(single != 0 for single in singles)
    tails = [float(stats.binom.sf(count - 1, different, 0.5)) for count in range(different + 1)]  # P(as many or more)
    return tails[worse] < LEVEL / 2, next((tail for tail in tails if tail < LEVEL / 2), 0.0)


def _taken_table(suites: Mapping[str, Rows]) -> Table:
    taken = {
        suite: Counter(row["deployed"] for of_seed in rows[CHOICE].values() for row in of_seed.values())
        for suite, rows in suites.items()
    }
    labels = {label.lower(): label for label in next(iter(suites.values())) if label != CHOICE}
    lines: list[list[Cell | str]] = [
        [suite, *(f"{100 * counts[name] / counts.total():.1f}%" for name in labels)] for suite, counts in taken.items()
    ]
    return Table("Taken", ["suite", *labels.values()], lines)


if __name__ == "__main__":
    main()
