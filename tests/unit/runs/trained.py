"""Two short runs that others export, ask and push: one of texts with classes, one of a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from befit.runs.runner import Run, run
from tests.unit.models.tiny_models import save_bert

ROWS = [{"review": "very good book", "stars": "good"}, {"review": "bad film", "stars": "bad"}]


def classifier(folder: Path) -> Run:
    """Two clients of one text classifier, alone and together."""
    save_bert(folder / "bert", labels=("bad", "good"))
    rows = [{**row, "review": f"{row['review']} {'abcde'[place % 5]}"} for place in range(12) for row in ROWS]
    for client, own in (("a", rows), ("b", [{**row, "stars": "good"} for row in rows[:12]] + rows[12:])):
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    config: dict[str, Any] = {
        "model": {"id": str(folder / "bert")},
        "data": {
            "task": "text-classification",
            "columns": {"text": "review", "label": "stars"},
            "clients": {name: str(folder / f"{name}.jsonl") for name in ("a", "b")},
        },
        "method": {"name": "fedit", "rank": 2},
        "baselines": [{"name": "local", "rank": 3, "rounds": 2}],
        "train": {"max_steps": 4, "batch_size": 4, "lr": 0.02},
        "federation": {"rounds": 2},
        "report": {"plots": False},
    }
    return run(config, out=folder / "run")


def language_model(folder: Path, **changes: Any) -> Run:
    """Two clients of the Llama that ships: ReLoRA folds each round into the model, so its adapters have full rank."""
    config: dict[str, Any] = {
        "benchmark": {"name": "skills", "clients": 2, "train": 24, "val": 4, "test": 12},
        "method": {"name": "relora", "rank": 2, "merge": {"space": "delta"}},
        "baselines": [{"name": "fedit", "rank": 4}],
        "train": {"max_steps": 3, "batch_size": 8, "lr": 0.01},
        "federation": {"rounds": 2},
        "report": {"plots": False},
    }
    return run(config | changes, out=folder / "run")
