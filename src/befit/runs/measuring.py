"""A client's own model measured on a file of records with their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from befit.data.files.load import load_records
from befit.runs.artifacts import client_folder, deployed_model
from befit.runs.loading import columns_of
from befit.runs.provenance import experiment_of, read_manifest
from befit.tasks import get_task


class Measured(TypedDict):
    """What a model scores on a file.

    examples  how many records there are
    scores    by metric, those of the run first, and the loss; of a classifier all metrics there are
    majority  the share of the file's most frequent class, of a classifier: what answering it always would get right
    """

    examples: int
    scores: dict[str, float]
    majority: float | None


def measure(run_dir: Path | str, client: str, files: Sequence[Path], method: str | None = None) -> Measured:
    """Measure the model that `predict` asks on all records of these files, which have the columns of training data.

    Raises RunError as `predict`, DataError for files that cannot be read and for labels that the model does not know.
    """
    run_dir = Path(run_dir)
    client_folder(run_dir, client, method)  # so that a wrong name is told before anything is read
    manifest, experiment = read_manifest(run_dir), experiment_of(run_dir)
    kind, columns = get_task(manifest["task"]), columns_of(experiment, client)
    drop = experiment.data is not None and experiment.data.missing == "drop"
    records = load_records(files, kind.name, columns, manifest["label_names"], drop)
    with deployed_model(run_dir, client, method) as (model, task):
        untyped: Any = task
        if kind.has_classes and kind.metrics:
            untyped.metrics = tuple(dict.fromkeys((*untyped.metrics, *kind.metrics)))
        batch_size, device = experiment.evaluate.batch_size, model.device
        with model.active():
            examples = task.refer(model.backbone, task.prepare(records), batch_size, device)
        scores = task.evaluate(model.backbone, examples, batch_size, device)
    counted = Counter(record["label"] for record in records) if kind.has_classes else None
    return {
        "examples": len(records),
        "scores": scores,
        "majority": None if counted is None else max(counted.values()) / len(records),
    }
