"""A client's language model under lm-evaluation-harness, which needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from befit.core.errors import RunError
from befit.runs.artifacts import client_folder, deployed_model
from befit.runs.provenance import read_manifest
from befit.tasks import get_task


def evaluate(
    run_dir: Path | str,
    client: str,
    tasks: Sequence[str],
    method: str | None = None,
    limit: int | None = None,
    include: Path | None = None,
) -> dict[str, dict[str, float]]:
    """What the harness measures of a client's own model, by task and metric, with standard errors as METRIC_stderr.

    The model is the one that `predict` asks, gates and all, and not an exported adapter.

    tasks    the harness' names of tasks, whose data it fetches itself
    limit    examples of each task; None: all
    include  a folder with further tasks, as YAML files, which may run code of their own

    Raises RunError where the harness is not installed, for a task that is of no language model, and for unknown tasks.
    """
    run_dir = Path(run_dir)
    client_folder(run_dir, client, method)
    if get_task(kind := read_manifest(run_dir)["task"]).auto_class != "AutoModelForCausalLM":
        raise RunError(
            f"{run_dir}: lm-evaluation-harness measures language models, and the task is {kind}: give a FILE of "
            "records with their answers in place of --tasks"
        )
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunError(f"lm-evaluation-harness is not installed ({error}): pip install lm-eval") from error
    manager = TaskManager(include_path=None if include is None else str(include))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise RunError(f"lm-evaluation-harness has no task {', '.join(unknown)}; lm-eval ls tasks lists them")
    with deployed_model(run_dir, client, method) as (model, task):
        untyped: Any = task
        harness = HFLM(pretrained=model.backbone, tokenizer=untyped.tokenizer, max_length=untyped.max_length)  # type: ignore[arg-type]
        done: Any = lm_eval.simple_evaluate(
            harness, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
        )
    return {name: _numbers(scores) for name, scores in done["results"].items()}


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The harness' `METRIC,FILTER` and `METRIC_stderr,FILTER`, the filter only where it is not none.

    >>> _numbers({"alias": "x", "acc,none": 1.0, "acc_stderr,none": 0.5, "em,strict": 0.0, "em_stderr,strict": "N/A"})
    {'acc': 1.0, 'acc_stderr': 0.5, 'em,strict': 0.0}
    """
    numbers: dict[str, float] = {}
    for name, value in scores.items():
        metric, comma, chosen = name.partition(",")
        if comma and isinstance(value, int | float):
            plain, error = metric.removesuffix("_stderr"), "_stderr" * metric.endswith("_stderr")
            numbers[plain + f",{chosen}" * (chosen != "none") + error] = float(value)
    return numbers
