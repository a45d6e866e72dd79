"""Write docs/claims.md: what papers claim, and what befit's studies say of it.

    befit compare studies/claims/potara.yaml --out OUT/potara      # and the others
    python benchmarks/claims.py OUT/potara OUT/guidance …

A directory is called like its study. Its numbers go to `results/claims_NAME.json` and `.csv`, its section of the page,
between `<!-- claims_NAME -->` and its end, is written anew, and so is the table of all claims.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from befit.report.table import Table, markdown
from befit.studies.compare.results import Comparison, Verdict
from common import HERE, RESULTS, keep_cells, put_section
from study_results import claims_table, kept, run_table

PAGE = HERE.parent / "docs" / "claims.md"
VERDICTS = ("shown", "refuted", "undecided")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path)
    for directory in parser.parse_args().directories:
        results: Comparison = json.loads((directory / "compare.json").read_text())
        study = directory.resolve().name
        keep_cells(directory, f"claims_{study}")
        shutil.copyfile(directory / "compare.csv", RESULTS / f"claims_{study}.csv")
        (RESULTS / f"claims_{study}.json").write_text(json.dumps(kept(results), indent=1) + "\n")
        put_section(PAGE, f"claims_{study}", section(results, study))
        print(f"{study}: {_counts(results['claims'])}")
    all_results = {
        path.stem.removeprefix("claims_"): json.loads(path.read_text())
        for path in sorted(RESULTS.glob("claims_*.json"))
    }
    put_section(PAGE, "claims", summary(all_results))


def summary(all_results: dict[str, Any]) -> str:
    """How many claims of each study are shown, refuted and undecided."""
    rows = []
    for study, results in all_results.items():
        found = [claim["verdict"] for claim in results["claims"]]
        rows.append([study, str(len(found)), *(str(found.count(word)) for word in VERDICTS)])
    totals = [sum(int(row[column]) for row in rows) for column in range(1, 5)]
    return markdown(Table("Claims", ["study", "claims", *VERDICTS], [*rows, ["all", *map(str, totals)]]))


def section(results: Comparison, study: str) -> str:
    """Claims, runs and what was chosen of one study, and the commands that make them."""
    name, seeds = f"studies/claims/{study}.yaml", _listed(results["seeds"])
    choice = results["chosen"]
    chosen = (
        f"`befit compare {name} --choose` (validation examples, seeds {_listed(choice['seeds'])}), then "
        if choice
        else ""
    )
    parts = [
        results["about"],
        f"Commands: {chosen}`befit compare {name}`, seeds {seeds}. Numbers: `benchmarks/results/claims_{study}.json`; "
        f"every client's score: `claims_{study}.csv`.",
        markdown(claims_table(results)),
        "All runs:",
        markdown(run_table(results)),
    ]
    if choice:
        settings = "; ".join(f"{run}: {_settings(one)}" for run, one in choice["settings"].items() if one)
        parts.append(f"Chosen: {settings}.")
    return "\n\n".join(parts)


def _counts(claims: list[Verdict]) -> str:
    found = [claim["verdict"] for claim in claims]
    return ", ".join(f"{found.count(word)} {word}" for word in VERDICTS)


def _settings(one: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in one.items())


def _listed(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


if __name__ == "__main__":
    main()
