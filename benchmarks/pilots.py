"""How often `befit plan` is right: pilots of the suites of studies/choice/, against their full runs.

    python benchmarks/pilots.py --jobs 2          # all pilots, then the section of docs/plan.md
    python benchmarks/pilots.py --seeds ""        # the section alone, from the pilots that were kept

A pilot has a third of a suite's rounds, and no test example. Its answer from the examples that the suite holds out is
kept beside that from all folds. The full runs with the same seeds, scored on test examples, are those that
`study_results.py` has kept for docs/choice.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from befit.report.numbers import ranges_text
from befit.report.table import Table, markdown
from befit.runs.provenance import experiment_of
from befit.studies.compare.comparison import make_plan
from befit.studies.pilot import NOT, PAYS, UNSURE, conclude, pilot, results_of, with_weights_chosen
from choice import SUITES, Rows, read
from common import HERE, RESULTS, put_section
from when import ALONE

PAGE, KEPT = HERE.parent / "docs" / "plan.md", RESULTS / "pilots.json"
ANSWERS = (PAYS, UNSURE, NOT)
ENDS = (0.0, 0.03, 0.1, 0.5, 0.9, 0.97, 1.0)  # of the probabilities of a gain
FOLDS = {"one fold": "one", "all folds": "all"}  # answers of a pilot
Pilot = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="13,14,15,16,17")
    parser.add_argument("--jobs", type=int, default=1)
    words = parser.parse_args()
    kept: dict[str, dict[str, dict[str, Pilot]]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    wanted = [
        (suite, seed) for seed in words.seeds.split(",") for suite in SUITES if seed and seed not in kept.get(suite, {})
    ]
    with ProcessPoolExecutor(words.jobs, multiprocessing.get_context("spawn")) as pool:
        for (suite, seed), found in zip(wanted, pool.map(piloted, *zip(*wanted, strict=True)), strict=True):
            kept.setdefault(suite, {})[seed] = found
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(
                suite,
                seed,
                *(f"{found[key]['answer']} ({found[key]['proposed']})" for key in FOLDS.values()),
                flush=True,
            )
    put_section(PAGE, "pilots", section(kept, {suite: read(suite) for suite in kept}))


def piloted(suite: str, seed: str) -> dict[str, Pilot]:
    """The answers of one pilot, from one fold and from all: of every method in the mean, and of every site for the
    method that is proposed."""
    torch.set_num_threads(1)
    plan = make_plan(HERE.parent / "studies" / "choice" / f"{suite}.yaml", seeds=[int(seed)])
    experiment = next(cell.experiment for cell in plan.cells if cell.label == "FedIT")
    with tempfile.TemporaryDirectory() as folder:
        found = pilot(experiment, folder, rounds=math.ceil(experiment.federation.rounds / 3))
        first = Path(folder) / "pilot"
        one = conclude(with_weights_chosen(results_of(first, experiment_of(first)), found["metric"]), found["metric"])
    rounds = {key: found[key] for key in ("rounds", "of_rounds")}
    return {"one": {**rounds, "folds": 1, **_kept(one)}, "all": {**rounds, "folds": found["folds"], **_kept(found)}}


def _kept(found: Mapping[str, Any]) -> Pilot:
    effect = ("gain", "low", "high", "probability", "answer")
    return {
        **{key: found[key] for key in ("proposed", "answer")},
        "methods": {label: {key: row[key] for key in (*effect, "measured")} for label, row in found["methods"].items()},
        "sites": {client: {key: row[key] for key in effect} for client, row in found["sites"].items()},
    }


def section(kept: Mapping[str, Mapping[str, Mapping[str, Pilot]]], full: Mapping[str, Rows]) -> str:
    """Answers beside what full runs gave on test examples: for all sites together, and for single sites."""
    seeds = sorted({int(seed) for of_suite in kept.values() for seed in of_suite})
    counts = {suite: {found["all"]["folds"] for found in pilots.values()} for suite, pilots in kept.items()}
    folds = ", ".join(f"{suite} {ranges_text(sorted(of_suite))}" for suite, of_suite in counts.items())
    parts = [
        f"Pilots with seeds {ranges_text(seeds)}, a third of the rounds each, in one fold and in all that the suites "
        f"have ({folds}). The full run's gain over training alone is in points, on test examples.",
    ]
    chosen = {
        name: {suite: {seed: found[key] for seed, found in pilots.items()} for suite, pilots in kept.items()}
        for name, key in FOLDS.items()
    }
    for name, of_suites in chosen.items():
        said = {suite: _of_suite(pilots, full[suite]) for suite, pilots in of_suites.items()}
        parts += [f"All sites together, {name}:", markdown(_table("suite", said))]
    folded = chosen["all folds"]
    parts += ["With all folds, every method of every pilot, whether it was proposed or not:"]
    parts += [markdown(_table("method", _by_method(folded, full)))]
    said = {suite: _sites(pilots, full[suite]) for suite, pilots in folded.items()}
    parts += ["With all folds, single sites, with the proposed method:", markdown(_table("suite", said))]
    parts += ["With all folds, sites by the probability of a gain that the pilot gave:"]
    parts += [markdown(_reliability(folded, full))]
    return "\n\n".join([*parts, "Command: `python benchmarks/pilots.py`. Numbers: `benchmarks/results/pilots.json`."])


Said = list[tuple[str, float]]  # an answer, and what the full run gained, in points


def gain(rows: Rows, method: str, seed: str) -> dict[str, float]:
    """What every site gained over training alone in the full run of a method, in points."""
    label = next(label for label in rows if label.lower() == method)
    alone = rows[ALONE][int(seed)]
    return {site: 100 * (row["score"] - alone[site]["score"]) for site, row in rows[label][int(seed)].items()}


def _of_suite(pilots: Mapping[str, Pilot], rows: Rows) -> Said:
    return [
        (found["answer"], statistics.fmean(gain(rows, found["proposed"], seed).values()))
        for seed, found in pilots.items()
    ]


def _by_method(kept: Mapping[str, Mapping[str, Pilot]], full: Mapping[str, Rows]) -> dict[str, Said]:
    said: dict[str, Said] = {}
    for suite, pilots in kept.items():
        for seed, found in pilots.items():
            for method, row in found["methods"].items():
                mean = statistics.fmean(gain(full[suite], method, seed).values())
                said.setdefault(method, []).append((row["answer"], mean))
    return said


def _sites(pilots: Mapping[str, Pilot], rows: Rows) -> Said:
    return [
        (row["answer"], gain(rows, found["proposed"], seed)[site])
        for seed, found in pilots.items()
        for site, row in found["sites"].items()
    ]


def _table(first: str, said: Mapping[str, Said]) -> Table:
    """How often each answer was given, what full runs gained on average there, and how often that was above and below
    zero."""
    lines = [
        [name, *(_cell([points for answer, points in one if answer == wanted]) for wanted in ANSWERS)]
        for name, one in said.items()
    ]
    together = [pair for one in said.values() for pair in one]
    lines.append(["all", *(_cell([points for answer, points in together if answer == one]) for one in ANSWERS)])
    return Table("Answers", [first, *(f"{answer}: n, gain (above / below zero)" for answer in ANSWERS)], lines)


def _cell(points: Sequence[float]) -> str:
    if not points:
        return "0"
    above, below = _signs(points)
    return f"{len(points)}, {statistics.fmean(points):+.1f} ({above} / {below})".replace("-", "−")


def _signs(points: Iterable[float]) -> tuple[int, int]:
    rounded = [round(value, 9) for value in points]  # equal shares of examples must tie
    return sum(value > 0 for value in rounded), sum(value < 0 for value in rounded)


def _reliability(kept: Mapping[str, Mapping[str, Pilot]], full: Mapping[str, Rows]) -> Table:
    """Whether sites with a high probability of a gain are those that gained."""
    pairs = [
        (row["probability"], gain(full[suite], found["proposed"], seed)[site])
        for suite, pilots in kept.items()
        for seed, found in pilots.items()
        for site, row in found["sites"].items()
    ]
    lines = []
    for low, high in itertools.pairwise(ENDS):
        points = [points for chance, points in pairs if low <= chance < high or chance == high == 1.0]
        above, below = _signs(points)
        share = f"{100 * above / (above + below):.0f}%" if above + below else "–"
        lines.append([f"{low:g} to {high:g}", str(len(points)), share, _cell(points)])
    headers = ["P(gain) of the pilot", "sites", "gained, of those not level", "n, gain (above / below zero)"]
    return Table("Reliability", headers, lines)


if __name__ == "__main__":
    main()
