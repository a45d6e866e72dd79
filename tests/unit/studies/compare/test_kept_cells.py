"""Cells that are kept beside the results are still cells of their studies, so that seeds can be added to them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from befit.studies.compare.comparison import make_plan

ROOT = Path(__file__).parents[4]
KEPT = {path.name.split(".")[0]: path for path in sorted((ROOT / "benchmarks" / "results").glob("*.cells.jsonl.gz"))}


def study_of(name: str) -> Path:
    """choice_digits: studies/choice/digits.yaml; when_digits: studies/offline/when-digits.yaml, and labels_digits."""
    folder, _, rest = name.partition("_")
    whole = folder in ("when", "labels")
    stem = (name if whole else rest).replace("_", "-")
    return ROOT / "studies" / ("offline" if whole else folder) / f"{stem}.yaml"


@pytest.mark.parametrize("name", KEPT)
def test_kept_cells_are_cells_of_their_study(name: str) -> None:
    plan = make_plan(study_of(name))
    with gzip.open(KEPT[name], "rt") as file:
        kept = {
            (cell["label"], cell["key"]) for cell in map(json.loads, file) if cell["scores"]["seed"] == plan.seeds[0]
        }
    planned = {(run.cells[0].label, run.cells[0].key) for run in plan.runs}
    assert planned <= kept
