"""Who has which tasks in FedMosaic's benchmarks (Tables 13 and 14), as in the scenario files of snumprlab/fedmosaic.

A task is DATASET-SUBSET and lies in DATASET/train/dataset-SUBSET.json; the order of a client's tasks is its stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from befit.core.errors import DataError
from befit.core.schema import show
from befit.core.storage import read_json

EMPTY = "dummy"  # a dataset of this name is a time without data


@dataclass(frozen=True)
class ClientTask:
    """A task of a client. `metric` is that of an open question, in the spelling of the scenario files."""

    dataset: str
    subset: int
    metric: str | None = None
    open: bool = False

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.subset}"


@dataclass(frozen=True)
class Scenario:
    """A client: its tasks in order, and the model that a scenario file gives it."""

    parts: tuple[ClientTask, ...]
    model: str = ""


def tasks_of(names: str) -> Scenario:
    """Tasks from their names, with commas between; F1 marks an open question.

    >>> [part.name for part in tasks_of("VSR-0, iconqa-2 F1").parts]
    ['VSR-0', 'iconqa-2']
    """
    parts = []
    for name in names.split(","):
        word, _, metric = name.strip().partition(" ")
        dataset, _, subset = word.rpartition("-")
        parts.append(ClientTask(dataset, int(subset), metric or None, bool(metric)))
    return Scenario(tuple(parts))


DRAKE = tuple(
    map(
        tasks_of,
        (
            "Fashion200K-0, MagicBrush-0, VISION-0, FashionIQ-0",
            "VSR-0, VISION-1, Fashion200K-2, NLVR2-0",
            "SEED-Bench-2-2, Fashion200K-1, NLVR2-1, CIRR-0",
            "VizWiz-0, IRFL-2, Bongard-HOI-1, MIT-States-0",
            "IRFL-1, Bongard-OpenWorld-1, COMICS_Dialogue-0, IRFL-0",
            "Bongard-HOI-2, Bongard-OpenWorld-0, IRFL-3, Bongard-HOI-0",
            "WCVQA-0, iconqa-2 F1, Co-Instruct-DB-2, SEED-Bench-2-1",
            "TQA-0, WCVQA-3, iconqa-1, Co-Instruct-DB-1",
            "Co-Instruct-DB-0, dvqa-0, WCVQA-1, iconqa-3 F1",
            "iconqa-0, Co-Instruct-DB-3, SEED-Bench-2-0, WCVQA-2",
        ),
    )
)
DRAKE_NEWCOMERS = tasks_of(
    "DreamSim-0, imagecode-0, RecipeQA_ImageCoherence-0, RecipeQA_VisualCloze-0, HQ_Edit-0, "
    "Mantis_contrastive_caption-0, Mantis_contrastive_caption-1"
).parts
HFLB = tuple(
    tasks_of(", ".join(f"{name}-{first + number}" for number in range(4)))
    for name, first in (
        ("GQA", 10),
        ("GQA", 20),
        ("GQA", 30),
        ("Abstract", 0),
        ("SNLI-VE", 0),
        ("COCOQA", 0),
        ("NLVR2_feddat", 0),
        ("VizWiz-Original", 0),
        ("AQUA", 0),
    )
)
# Clients with the smaller model, by their number in the scenario file: the paper and the file differ.
SMALL: Mapping[str, Mapping[str, frozenset[int]]] = {
    "drake": {"paper": frozenset({0, 6, 8, 9}), "scenario": frozenset({0, 1, 8, 9})},
    "hflb": {"paper": frozenset({0, 1, 2}), "scenario": frozenset({0, 1, 5})},
}


def read_scenario(path: Path) -> tuple[Scenario, ...]:
    """The clients of a scenario file. Raises DataError that names client and dataset."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} must be a list of clients, got {show(entries)}")
    scenarios = []
    for number, client in enumerate(entries):
        where = f"{path}, client {number}"
        if not isinstance(client, dict) or not isinstance(client.get("datasets"), list) or not client["datasets"]:
            raise DataError(f"{where}: must be an object with datasets, got {show(client)}")
        parts = tuple(part_of(dataset, where) for dataset in client["datasets"])
        scenarios.append(Scenario(parts, str(client.get("model_id", ""))))
    return tuple(scenarios)


def part_of(data: object, where: str) -> ClientTask:
    if isinstance(data, dict) and data.get("dataset") == EMPTY:
        return ClientTask(EMPTY, 0)
    if not isinstance(data, dict) or not isinstance(data.get("dataset"), str) or type(data.get("subset_id")) is not int:
        raise DataError(f"{where}: a dataset must have dataset and subset_id, got {show(data)}")
    if data.get("type") not in ("multi-choice", "open-ended"):
        raise DataError(
            f"{where}, {data['dataset']}: type must be multi-choice or open-ended, got {show(data.get('type'))}"
        )
    is_open = data["type"] == "open-ended"
    if is_open and data.get("metric") not in ("F1", "RougeL"):
        raise DataError(f"{where}, {data['dataset']}: metric must be F1 or RougeL, got {show(data.get('metric'))}")
    return ClientTask(data["dataset"], data["subset_id"], data["metric"] if is_open else None, is_open)
