"""Write docs/claims.md: what papers claim, and what befit's studies say of it.

    befit compare studies/claims/potara.yaml --out OUT/potara      # and the others
    python benchmarks/claims.py OUT/potara OUT/guidance …

A directory is called like its study. Its numbers go to `results/claims_NAME.json` and `.csv`, its section of the page,
between `<!-- claims_NAME -->` and its end, is written anew, and so is the table of all claims. It counts what
`results/again_NAME.json` and `again_NAME_WHAT.json` say of claims that were tested once more (studies/again/*.yaml, by
study_results.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from befit.report.numbers import ranges_text
from befit.report.table import Table, markdown
from befit.studies.compare.results import Comparison, Verdict
from common import HERE, RESULTS, put_section
from study_results import claims_table, keep, run_table

PAGE = HERE.parent / "docs" / "claims.md"
VERDICTS = ("shown", "refuted", "undecided")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path)
    for directory in parser.parse_args().directories:
        study = directory.resolve().name
        results = keep(directory, f"claims_{study}")
        put_section(PAGE, f"claims_{study}", section(results, study))
        print(f"{study}: {_counts(results['claims'])}")
    put_section(PAGE, "claims", summary(_claims("claims"), _claims("again")))


def summary(first: dict[str, list[Verdict]], again: dict[str, list[Verdict]]) -> str:
    """How many claims of each study are shown, refuted and undecided, and how many were tested twice."""
    rows = []
    for study, claims in first.items():
        second = {claim["name"]: claim["verdict"] for claim in again.get(study, [])}
        found = [second.get(claim["name"], claim["verdict"]) for claim in claims]
        rows.append([study, len(found), *map(found.count, VERDICTS), len(second)])
    totals = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
    lines = [[str(cell) for cell in row] for row in (*rows, ["all", *totals])]
    return markdown(Table("Claims", ["study", "claims", *VERDICTS, "tested twice"], lines))


def _claims(kind: str) -> dict[str, list[Verdict]]:
    """By study; what comes after a second "_" in a file's name tells apart those of one study."""
    claims: dict[str, list[Verdict]] = {}
    for path in sorted(RESULTS.glob(f"{kind}_*.json")):
        study = path.stem.removeprefix(f"{kind}_").partition("_")[0]
        claims.setdefault(study, []).extend(json.loads(path.read_text())["claims"])
    return claims


def section(results: Comparison, study: str) -> str:
    """Claims, runs and what was chosen of one study, and the commands that make them."""
    name, seeds = f"studies/claims/{study}.yaml", ranges_text(results["seeds"])
    choice = results["chosen"]
    chosen = (
        f"`befit compare {name} --choose` (validation examples, seeds {ranges_text(choice['seeds'])}), then "
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


if __name__ == "__main__":
    main()
