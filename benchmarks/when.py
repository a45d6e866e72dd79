"""Write the maps of docs/when.md: where each method gains over training alone, as figures and tables.

    befit compare studies/offline/when-digits.yaml --out OUT/when-digits
    python benchmarks/when.py OUT/when-digits

A directory is called like its study, which has one grid with the axes run, a row's and a column's. Its scores go to
`results/NAME.csv`, a map's figure to `docs/figures/NAME.svg`, and the section of that name in the page is written anew.
Without directories the kept scores are drawn again.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from befit.report.numbers import ranges_text
from befit.report.table import Table, markdown
from befit.studies.compare.results import TTest
from befit.studies.compare.statistics import LEVEL, holm, paired
from befit.studies.compare.study import read_study
from common import HERE, RESULTS, keep_cells, put_section

PAGE = HERE.parent / "docs" / "when.md"
FIGURES = HERE.parent / "docs" / "figures"
STUDIES = HERE.parent / "studies" / "offline"
ALONE = "Local"
SEPARATOR = " · "
ALL = "all"
POINT = 0.01 + 1e-9  # differences of shares of examples are rounded, and exactly one point is not more than one
Place = tuple[str, str]  # row, column
Scores = Mapping[str, Mapping[Place, Mapping[int, Mapping[str, float]]]]  # by run, place, seed and client


@dataclass(frozen=True)
class Map:
    """What one map shows.

    title          of the figure
    rows, columns  what its axes count
    """

    title: str
    rows: str
    columns: str


MAPS = {
    "when-digits": Map("Digits", "looks of the scanners", "training images a site"),
    "when-skills": Map("Skills", "tasks among eight sites", "training words a site"),
    "when-names": Map("Names", "Dirichlet parameter of kinds", "training names a site"),
    "when-questions": Map("Questions", "streams among ten sites", "training questions a site"),
}
# Of the same labelled examples, trained on by all runs but one.
LABELS = {
    "labels-digits": Map("Held-out labels, digits", "looks of the scanners", "labelled images a site"),
    "labels-skills": Map("Held-out labels, skills", "tasks among eight sites", "labelled words a site"),
    "labels-names": Map("Held-out labels, names", "Dirichlet parameter of kinds", "labelled names a site"),
}
HELD_OUT, CROSS_FITTED = "Held out", "Cross-fitted"


@dataclass(frozen=True)
class Gain:
    """Over training alone, or another reference, at one place: the test over seeds, whether it is shown to be above or
    below (+1, -1, else 0), and the share of sites of all seeds that lose more than a point."""

    test: TTest
    shown: int
    losing: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path)
    FIGURES.mkdir(exist_ok=True)
    for directory in parser.parse_args().directories:
        name = directory.resolve().name.replace("-", "_")
        keep_cells(directory, name)
        keep(directory / "compare.csv", RESULTS / f"{name}.csv")
    for name, drawn in MAPS.items():
        if (kept := RESULTS / f"{name.replace('-', '_')}.csv").is_file():
            scores = read(kept)
            level = read_study(STUDIES / f"{name}.yaml").head.level
            found = gains(scores, level=level)
            draw(FIGURES / f"{name}.svg", drawn, found)
            put_section(PAGE, name, section(name, drawn, scores, found, level))
            print(f"{name}: {', '.join(found)}")
    for name, drawn in LABELS.items():
        if (kept := RESULTS / f"{name.replace('-', '_')}.csv").is_file():
            put_section(PAGE, name, labels_section(name, drawn, read(kept)))
            print(name)


def keep(source: Path, target: Path) -> None:
    """The scores of a comparison without what the study says."""
    rows = list(csv.DictReader(source.open()))
    metric = list(rows[0])[4]
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "seed", "client", metric, "examples"])
        writer.writerows([row["run"], row["seed"], row["client"], row[metric], row["examples"]] for row in rows)


def read(path: Path) -> Scores:
    """All scores that were kept."""
    scores: dict[str, dict[Place, dict[int, dict[str, float]]]] = {}
    for label, seed, client, score, _ in list(csv.reader(path.open()))[1:]:
        run, row, column = label.split(SEPARATOR)
        places = scores.setdefault(run, {}).setdefault((row, column), defaultdict(dict))
        places[int(seed)][client] = float(score)
    return scores


def gains(scores: Scores, reference: str = ALONE, level: float = LEVEL) -> dict[str, dict[Place, Gain]]:
    """Of every other run over the reference, by run and place; Holm's correction is for all of these differences."""
    tests: dict[tuple[str, Place], TTest] = {}
    losing: dict[tuple[str, Place], float] = {}
    for run in scores:
        for place, seeds in scores[run].items() if run != reference else ():
            beside = scores[reference][place]
            pairs = [(seeds[seed], beside[seed]) for seed in sorted(set(seeds) & set(beside))]
            differences = [
                statistics.fmean(mine.values()) - statistics.fmean(theirs.values()) for mine, theirs in pairs
            ]
            test = paired(differences)
            if test is None:
                continue
            tests[run, place] = test
            sites = [mine[site] - theirs[site] for mine, theirs in pairs for site in mine]
            losing[run, place] = sum(difference < -POINT for difference in sites) / len(sites)
    adjusted = holm({SEPARATOR.join((run, *place)): test["p"] for (run, place), test in tests.items()})
    found: dict[str, dict[Place, Gain]] = {}
    for (run, place), test in tests.items():
        p = adjusted[SEPARATOR.join((run, *place))]
        shown = 0 if p is None or p >= level else int(math.copysign(1, test["mean"]))
        found.setdefault(run, {})[place] = Gain(test, shown, losing[run, place])
    return found


def by_rows(scores: Scores) -> Scores:
    """All scores of a row as those of one place, and all of the map as those of another: a site counts once for each
    place, so that the mean is that of the places' means.

    >>> by_rows({"FedIT": {("2", "10"): {0: {"a": 0.5}}, ("2", "20"): {0: {"a": 0.7}}}})["FedIT"]["2", ALL][0]
    {'10 · a': 0.5, '20 · a': 0.7}
    """
    joined: dict[str, dict[Place, dict[int, dict[str, float]]]] = {}
    for run, places in scores.items():
        of_run = joined.setdefault(run, defaultdict(lambda: defaultdict(dict)))
        for (row, column), seeds in places.items():
            for seed, sites in seeds.items():
                for site, score in sites.items():
                    of_run[row, ALL][seed][SEPARATOR.join((column, site))] = score
                    of_run[ALL, ALL][seed][SEPARATOR.join((row, column, site))] = score
    return joined


def axes_of(found: Mapping[str, Mapping[Place, Gain]]) -> tuple[list[str], list[str]]:
    """The labels of rows and columns, in the study's order."""
    places = next(iter(found.values()))
    return list(dict.fromkeys(row for row, _ in places)), list(dict.fromkeys(column for _, column in places))


def draw(path: Path, drawn: Map, found: Mapping[str, Mapping[Place, Gain]]) -> None:
    """One panel a run: the gain in points, bold where it is shown."""
    rows, columns = axes_of(found)
    largest = max(abs(gain.test["mean"]) for places in found.values() for gain in places.values()) * 100
    style: Any = {"svg.hashsalt": "befit", "font.family": ["sans-serif"], "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.1 * len(found) + 0.6, 0.45 * len(rows) + 1.3), layout="constrained")
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for panel, (run, places) in zip(panels, found.items(), strict=True):
            _panel(panel, places, rows, columns, largest)
            panel.set_title(f"{run} minus {ALONE}", fontsize=10)
            panel.set_xlabel(drawn.columns)
        panels[0].set_ylabel(drawn.rows)
        panels[0].invert_yaxis()  # of all: they share it
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _panel(axes: Axes, places: Mapping[Place, Gain], rows: list[str], columns: list[str], largest: float) -> None:
    values = [[places[row, column].test["mean"] * 100 for column in columns] for row in rows]
    axes.pcolormesh(values, cmap="RdBu", vmin=-largest, vmax=largest, edgecolors="white", linewidth=1.5)
    axes.set_xticks([index + 0.5 for index in range(len(columns))], columns)
    axes.set_yticks([index + 0.5 for index in range(len(rows))], rows)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            gain = places[row, column]
            value = gain.test["mean"] * 100
            axes.text(
                x + 0.5,
                y + 0.5,
                f"{value:+.1f}".replace("-", "−"),
                ha="center",
                va="center",
                weight="bold" if gain.shown else "normal",
                color="white" if abs(value) > 0.6 * largest else "#222",
            )


def labels_section(name: str, drawn: Map, scores: Scores) -> str:
    """All differences from training alone, and between the two ways to weigh; and the command."""
    found, seeds = gains(scores), _seeds(scores)
    rows, columns = axes_of(found)
    beside = gains({run: scores[run] for run in (HELD_OUT, CROSS_FITTED)}, HELD_OUT)[CROSS_FITTED]
    lines = []
    for column in columns:
        for row in rows:
            place = row, column
            over = [f"{gain_text(places[place])} ({places[place].losing:.0%})" for places in found.values()]
            lines.append([column, row, f"{_alone(scores, place) * 100:.1f}", *over, gain_text(beside[place])])
    headers = [drawn.columns, drawn.rows, ALONE, *found, f"{CROSS_FITTED} over {HELD_OUT.lower()}"]
    return "\n\n".join(
        [
            f"Points over {ALONE}; {len(seeds)} seeds. ± is half of the 95 % interval. ✓ marks what is shown to be "
            "above or below (paired t test over seeds, p < 0.05 after Holm's correction, for the "
            f"{len(lines) * len(found)} differences from {ALONE} and for the {len(lines)} of the last column). In "
            f"brackets is the share of sites more than a point below {ALONE}.",
            markdown(Table(drawn.title, headers, lines)),
            _command(name, seeds),
        ]
    )


def _alone(scores: Scores, place: Place) -> float:
    """The mean of training alone at a place, over sites and seeds."""
    return statistics.fmean(statistics.fmean(clients.values()) for clients in scores[ALONE][place].values())


def _seeds(scores: Scores) -> list[int]:
    return sorted({seed for places in scores.values() for one in places.values() for seed in one})


def _command(name: str, seeds: Sequence[int]) -> str:
    return (
        f"Command: `befit compare studies/offline/{name}.yaml`, seeds {ranges_text(seeds)}; every client's score: "
        f"`benchmarks/results/{name.replace('-', '_')}.csv`."
    )


def section(name: str, drawn: Map, scores: Scores, found: Mapping[str, Mapping[Place, Gain]], level: float) -> str:
    """The figure, the table of all differences with their intervals, and the command."""
    rows, columns = axes_of(found)
    seeds, lines = _seeds(scores), []
    for row in rows:
        for column in columns:
            gained = [places[row, column] for places in found.values()]
            lines.append(
                [
                    row,
                    column,
                    f"{_alone(scores, (row, column)) * 100:.1f}",
                    *map(gain_text, gained),
                    _best(found, (row, column)),
                ]
            )
    headers = [drawn.rows, drawn.columns, ALONE, *found, "highest of those shown to gain"]
    joined = gains(by_rows(scores), level=level)
    means = [
        [row, *(f"{gain_text(gain)} ({gain.losing:.0%})" for gain in (places[row, ALL] for places in joined.values()))]
        for row in (*rows, ALL)
    ]
    return "\n\n".join(
        [
            f"![{drawn.title}: gain over training alone by {drawn.rows} and {drawn.columns}](figures/{name}.svg)",
            f"Points over {ALONE}, in the mean over a row and over all places; {len(seeds)} seeds. ± is half of the 95 "
            f"% interval. ✓ marks what is shown to be above or below {ALONE} (paired t test over seeds, p < "
            f"{level:g} after Holm's correction for the {len(means) * len(found)} differences of this table). In "
            f"brackets is the share of sites more than a point below {ALONE}; a site has few test examples, so part of "
            "that is chance.",
            markdown(Table(f"{drawn.title} by rows", [drawn.rows, *joined], means)),
            "Points at every place. Bold in the figure and ✓ in the table: shown to be above or below at the same "
            f"level, with Holm's correction for the {len(rows) * len(columns) * len(found)} differences of this map.",
            markdown(Table(drawn.title, headers, lines)),
            _command(name, seeds),
        ]
    )


def gain_text(gain: Gain) -> str:
    """In points, with half of the 95 % interval, and a mark where it is shown.

    >>> gain_text(Gain({"mean": -0.01, "low": -0.03, "high": 0.01, "p": 0.3, "n": 3}, 0, 0.5))
    '−1.0 ± 2.0'
    """
    low, high = gain.test["low"], gain.test["high"]
    half = "" if low is None or high is None else f" ± {(high - low) * 50:.1f}"
    return f"{gain.test['mean'] * 100:+.1f}{half}{' ✓' if gain.shown else ''}".replace("-", "−")


def _best(found: Mapping[str, Mapping[Place, Gain]], place: Place) -> str:
    """The run with the highest mean among those that are shown to be above training alone, or training alone where all
    are shown to be below it; a dash where nothing is shown."""
    above: Sequence[tuple[float, str]] = [
        (places[place].test["mean"], run) for run, places in found.items() if places[place].shown > 0
    ]
    if above:
        return max(above)[1]
    return ALONE if all(places[place].shown < 0 for places in found.values()) else "–"


if __name__ == "__main__":
    main()
