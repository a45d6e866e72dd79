"""Zou et al. 2026 (Potara): what its tables say of tasks, averages and bytes, against the studies as they resolve.

Tables 2, 3, 6, 8 and 9 are the averages of the compared methods, in percent; Table 4 has the two branches on CIFAR-100,
Table 5 those on commonsense; Table 7 the tasks of FLAN. Section 4.3 has the megabytes of one factor of the adapter, 1e6
bytes of float32, and what Potara saves against FedIT. Table 11, the hyperparameters, is in
tests/unit/studies/compare/test_study_settings.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from befit.cost.architecture import find_architecture
from befit.cost.compare import compare
from befit.data.papers.commonsense_tasks import TASKS as COMMONSENSE
from befit.data.papers.flan import TASKS as FLAN
from befit.protocol.registry import build_method
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.plan import Plan

STUDIES = Path(__file__).parents[2] / "studies" / "potara"
COLUMNS = ("Local", "FFA-LoRA", "FedSA-LoRA", "FedIT", "FedALT", "FedDPA", "Fisher merging", "Potara")
AVERAGES = {
    "cifar100-10": (60.43, 41.52, 60.87, 61.28, None, 61.80, 61.72, 65.21),  # Table 2
    "commonsense-8": (72.05, 68.80, 71.15, 71.94, 71.48, 72.33, None, 74.18),  # Table 3
    "flan-8": (78.79, 77.65, 78.50, 78.39, 78.83, 78.61, None, 79.74),  # Table 6
    "cifar100-20": (60.81, 44.40, 59.45, 62.22, None, 62.77, 61.73, 65.66),  # Table 8
    "commonsense-16": (72.64, 69.39, 71.25, 72.74, 72.55, 73.06, None, 74.31),  # Table 9
}
BRANCHES = {  # Tables 4 and 5
    "cifar100-10": {"Local, the branch": 55.89, "FedIT, the branch": 57.88},
    "commonsense-8": {"FedIT, the branch": 67.73},  # Local there is the main table's
}
# Section 4.3: A and B of one client and, on CIFAR-100, the saving against FedIT in percent; on commonsense it follows.
SHAPES = {
    "cifar100": ("vit-b-16", ("q_proj", "v_proj")),
    "commonsense": ("llama-3.2-3b", ("q_proj", "k_proj", "v_proj")),
}
MEGABYTES = {"cifar100": (0.59, 0.59, 33.3), "commonsense": (8.26, 4.59, 91.7)}


@cache
def planned(name: str) -> Plan:
    return make_plan(STUDIES / f"{name}.yaml")


@pytest.mark.parametrize("name", AVERAGES)
def test_the_papers_averages_stand_beside_the_runs_they_are_of(name: str) -> None:
    expected = dict(zip(COLUMNS, AVERAGES[name], strict=True)) | BRANCHES.get(name, {})
    found = {run.label: run.paper for run in planned(name).runs if run.paper is not None}
    assert found == {label: value for label, value in expected.items() if value is not None}


def test_the_tasks_are_those_of_the_paper() -> None:
    """Table 7, where mnli is FLAN's mnli_matched; section 4.1 for commonsense."""
    assert sorted(FLAN) == [
        "arc_challenge",
        "cosmos_qa",
        "definite_pronoun_resolution",
        "glue_qqp",
        "hellaswag",
        "mnli",
        "squad_v1",
        "sst2",
    ]
    assert [task.name for task in COMMONSENSE] == [
        "arc_challenge",
        "arc_easy",
        "boolq",
        "hellaswag",
        "openbookqa",
        "piqa",
        "social_i_qa",
        "winogrande",
    ]


@pytest.mark.parametrize("name", ["cifar100-10", "cifar100-20", "commonsense-8", "commonsense-16"])
def test_runs_of_the_studies_send_the_papers_megabytes(name: str) -> None:
    """FedIT sends both factors in each of 600 rounds, FedSA A and FFA-LoRA B; Potara saves a third, and 91.7 %."""
    kind = name.partition("-")[0]
    model, targets = SHAPES[kind]
    A, B, saving = MEGABYTES[kind]
    methods = {run.label: build_method(run.cells[0].experiment.method) for run in planned(name).runs}
    (rounds,) = {run.cells[0].experiment.federation.rounds for run in planned(name).runs if "branch" not in run.label}
    rows = {row["method"]: row for row in compare(find_architecture(model), methods, targets, rounds=rounds)}
    assert round(rows["FedSA-LoRA"]["upload_bytes_per_round"] / 1e6, 2) == A
    assert round(rows["FFA-LoRA"]["upload_bytes_per_round"] / 1e6, 2) == B
    sent = {label: row["upload_bytes_total"] for label, row in rows.items()}
    assert sent["FedIT"] == sent["FedDPA"] == sent["FedSA-LoRA"] + sent["FFA-LoRA"]
    assert sent["Potara"] == sent["w = 0.5"] and sent.get("Fisher merging", sent["Potara"]) == sent["Potara"]
    assert round(100 * (1 - sent["Potara"] / sent["FedIT"]), 1) == saving
