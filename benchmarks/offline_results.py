"""Write the tables of finished offline comparisons into docs/results.md, and their numbers beside the other results.

    befit compare studies/offline/skills.yaml --out OUT/skills      # and the others
    python benchmarks/offline_results.py OUT/skills OUT/digits …

A directory is called like its study. Its section of the page, between `<!-- offline_NAME -->` and its end, is written
anew; `results/offline_NAME.csv` gets every client's score and `results/offline_NAME.json` what the tables say.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from befit.report.markdown import markdown_table
from befit.report.numbers import NOTHING, plain, spread_text
from befit.report.table import markdown
from befit.studies.compare.beside import beside_tables
from befit.studies.compare.summary import verdict
from befit.studies.compare.texts import difference_text, p_text
from befit.studies.compare.wins_tables import budget_tables, wins_tables
from common import RESULTS, put_section

PAGE = Path(__file__).parent.parent / "docs" / "results.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    for directory in parser.parse_args().directories:
        results = json.loads((directory / "compare.json").read_text())
        name = f"offline_{directory.resolve().name.replace('-', '_')}"
        shutil.copyfile(directory / "compare.csv", RESULTS / f"{name}.csv")
        (RESULTS / f"{name}.json").write_text(json.dumps(kept(results), indent=1) + "\n")
        put_section(PAGE, name, section(results, name, directory.resolve().name))
        print(f"{name}: {len(results['runs'])} runs, {len(results['failures'])} cells without results")


def section(results: dict[str, Any], name: str, study: str) -> str:
    """The tables of one comparison, and the command that makes them."""
    seeds = ", ".join(map(str, results["seeds"]))
    parts = [
        f"Command: `befit compare studies/offline/{study}.yaml`, seeds {seeds}. Numbers: "
        f"`benchmarks/results/{name}.json`; every client's score: `{name}.csv`.",
        markdown_table(run_table(results)),
    ]
    if failed := results["failures"]:
        parts.append(
            "Without results: " + "; ".join(f"{one['run']}, seed {one['seed']}: {one['error']}" for one in failed)
        )
    wins = [one for one in wins_tables(results) if not one.detail] if results.get("budgets") else []
    for one in [*beside_tables(results), *budget_tables(results), *wins]:
        parts += [f"**{one.title}**", markdown(one)]
    return "\n\n".join(parts)


def run_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """One line for every run."""
    metric, reference = results["metric"], plain(results["reference"])
    headers = [
        "run",
        f"mean {metric.replace('_', ' ')}",
        "worst client",
        f"minus {reference} ± 95 %",
        "p",
        "shown",
        "clients better / same / worse",
        "MB sent",
        "steps",
    ]
    rows = []
    for run in results["runs"]:
        against, itself = run["against"], run["label"] == results["reference"]
        signed = (against or {}).get("signed")
        rows.append(
            [
                plain(run["label"]),
                spread_text(run["mean"], metric),
                spread_text(run["worst"], metric),
                difference_text(against["t"], metric) if against else "",
                p_text(against["t"]["p_holm"]) if against else "",
                "" if itself or verdict(against) == "no difference shown" else verdict(against),
                f"{signed['better']} / {signed['ties']} / {signed['worse']}" if signed else "",
                NOTHING if run["bytes_up"] is None else f"{run['bytes_up'] / 1e6:.1f}",
                NOTHING if run["steps"] is None else f"{run['steps']:.0f}",
            ]
        )
    return headers, rows


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """Without what the CSV has, and without configurations, which the study says."""
    runs = [
        {key: value for key, value in run.items() if key not in ("clients", "config", "curve", "seeds")}
        | {"seeds": [{key: cell[key] for key in ("seed", "mean", "data", "beside")} for cell in run["seeds"]]}
        for run in results["runs"]
    ]
    return {**{key: value for key, value in results.items() if key not in ("tables",)}, "runs": runs}


if __name__ == "__main__":
    main()
