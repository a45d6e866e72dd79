"""Write the tables of finished comparisons into their pages, and their numbers beside the other results.

    befit compare studies/offline/skills.yaml --out OUT/offline-skills      # and the others
    python benchmarks/study_results.py OUT/offline-skills OUT/fedlora-digits …

A directory is called like its study: `offline-skills` for studies/offline/skills.yaml. The section between
`<!-- offline_skills -->` and its end is written anew, on the page of docs/ that has it; `results/offline_skills.csv`
gets every client's score, `results/offline_skills.json` what the tables say, and
`results/offline_skills.cells.jsonl.gz` what `befit compare --cells` takes, so that seeds can be added without running
the others again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from befit.report.numbers import ranges_text
from befit.report.table import P_VALUE, Cell, Table, decimals, markdown, mean_cell
from befit.studies.compare.results import Comparison
from befit.studies.compare.summary import verdict
from befit.studies.compare.tables import beside_tables, contrast_text, difference_cell, grid_table, measured
from befit.studies.compare.wins_tables import budget_tables, wins_tables
from common import HERE, RESULTS, keep_cells, put_section

STUDIES, PAGES = HERE.parent / "studies", HERE.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    for directory in parser.parse_args().directories:
        study = study_of(directory.resolve().name)
        name = directory.resolve().name.replace("-", "_")
        results = keep(directory, name)
        put_section(page_of(name), name, section(results, name, study))
        print(f"{name}: {len(results['runs'])} runs, {len(results['failures'])} cells without results")


def keep(directory: Path, name: str) -> Comparison:
    """Keep the numbers of a comparison beside the other results; returns them."""
    results: Comparison = json.loads((directory / "compare.json").read_text())
    keep_cells(directory, name)
    shutil.copyfile(directory / "compare.csv", RESULTS / f"{name}.csv")
    (RESULTS / f"{name}.json").write_text(json.dumps(kept(results), indent=1) + "\n")
    return results


def study_of(name: str) -> Path:
    """The study, below studies/, whose folders and name are joined to this one. Raises SystemExit for others."""
    for path in STUDIES.rglob("*.yaml"):
        study = path.relative_to(STUDIES)
        if "-".join(study.with_suffix("").parts) == name:
            return study
    raise SystemExit(f"{name}: no study is called so; call the directory FOLDER-STUDY, such as offline-digits")


def page_of(name: str) -> Path:
    """The page with a section of this name. Raises SystemExit where there is none."""
    for page in sorted(PAGES.glob("*.md")):
        if f"<!-- {name} -->" in page.read_text():
            return page
    raise SystemExit(f"{name}: write <!-- {name} --> and <!-- /{name} --> where its tables go, into a page of docs/")


def section(results: Comparison, name: str, study: Path) -> str:
    """The tables of one comparison, and the command that makes them."""
    parts = [
        f"Command: `befit compare studies/{study}`, seeds {ranges_text(results['seeds'])}. Numbers: "
        f"`benchmarks/results/{name}.json`; every client's score: `{name}.csv`.",
    ]
    for grid in results["tables"]:
        table = grid_table(results, grid)
        parts += [f"**{table.title}**", markdown(table)]
    if not results["tables"]:
        parts.append(markdown(run_table(results)))
    if results["claims"]:
        parts.append(markdown(claims_table(results)))
    if failures := results["failures"]:
        cells = "; ".join(f"{cell['run']}, seed {cell['seed']}: {cell['error']}" for cell in failures)
        parts.append(f"Without results: {cells}")
    tables = beside_tables(results)
    if compares_budgets(results):
        tables = [*tables, *budget_tables(results), *(table for table in wins_tables(results) if not table.detail)]
    for table in tables:
        parts += [f"**{table.title}**", markdown(table)]
    return "\n\n".join(parts)


def claims_table(results: Comparison) -> Table:
    """A row for every contrast of every claim."""
    rows: list[list[str]] = []
    for claim in results["claims"]:
        for number, one in enumerate(claim["contrasts"]):
            contrast = [contrast_text(one["weights"]), measured(claim), _interval(one)]
            first = [claim["says"], claim["source"]], [f"{claim['by']:g}", claim["verdict"]]
            said, judged = (["", ""], ["", ""]) if number else first
            rows.append([*said, *contrast, *judged])
    headers = ["claim", "source", "contrast", "of", "points (95 % interval)", "margin", "verdict"]
    return Table("Claims", headers, rows)


def _interval(one: Any) -> str:
    if one["spread"] is None:
        return "–"
    ends = "" if one["low"] is None else f" ({one['low'] * 100:+.1f} to {one['high'] * 100:+.1f})"
    return f"{one['spread']['mean'] * 100:+.1f}{ends}".replace("-", "−")


def compares_budgets(results: Comparison) -> bool:
    """Whether two methods or more have several budgets; one method at two ranks is two rows of the table of runs."""
    return any(sum(len(row["scores"]) > 1 for row in entry["rows"]) > 1 for entry in results["budgets"])


def run_table(results: Comparison) -> Table:
    """One line for every run."""
    metric, reference = results["metric"], results["reference"]
    headers = [
        "run",
        f"mean {metric.replace('_', ' ')}",
        "worst client",
        f"minus {reference} ± 95 %",
        "p",
        "shown",
        "clients better / same / worse",
        "MB up",
        "MB down",
        "steps",
        "CPU s",
    ]
    rows = []
    for run in results["runs"]:
        against, reading = run["against"], verdict(run["against"], results["level"])
        tests: list[Cell | str] = ["", "", ""]
        if against:
            signed = against["signed"]
            tests = [
                difference_cell(against["t"], metric),
                Cell(against["t"].get("p_holm"), P_VALUE),
                f"{signed['better']} / {signed['ties']} / {signed['worse']}",
            ]
        rows.append(
            [
                run["label"],
                mean_cell(run["mean"], metric),
                mean_cell(run["worst"], metric),
                *tests[:2],
                "" if run["label"] == reference or reading == "no difference shown" else reading,
                tests[2],
                *(
                    Cell(None if sent is None else sent / 1e6, decimals(1))
                    for sent in (run["bytes_up"], run["bytes_down"])
                ),
                Cell(run["steps"], decimals(0)),
                Cell(run["cpu_seconds"], decimals(1)),
            ]
        )
    return Table("All runs", headers, rows)


def kept(results: Comparison) -> dict[str, Any]:
    """Without what the CSV has, and without configurations, which the study says."""
    runs = [
        {key: value for key, value in run.items() if key not in ("clients", "config", "curve", "seeds")}
        | {"seeds": [{key: cell[key] for key in ("seed", "mean", "data", "beside")} for cell in run["seeds"]]}
        for run in results["runs"]
    ]
    return {**{key: value for key, value in results.items() if key not in ("tables",)}, "runs": runs}


if __name__ == "__main__":
    main()
