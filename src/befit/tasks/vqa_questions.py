"""What a record of a question about images says: its images, and how an answer to it is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.core.errors import DataError
from befit.tasks.base import Record
from befit.tasks.text_metrics import GENERATED
from befit.tasks.vqa_metrics import POOLED
from befit.tasks.vqa_prompts import MARK

__all__ = ["as_record", "images_of", "judging"]


def as_record(value: Any) -> Record:
    """An input of `predict` as a record with a conversation.

    >>> as_record({"images": ["a.png"], "question": "What is it?"})["conversation"]
    [{'role': 'user', 'content': '<image>What is it?'}]
    """
    if isinstance(value, str):
        value = {"question": value}
    if not isinstance(value, Mapping) or "conversation" in value or not isinstance(value.get("question"), str):
        return value if isinstance(value, Mapping) else {}
    images, question = value.get("images", ()), value["question"]
    marks = "" if MARK in question else MARK * len(images)
    return {**value, "conversation": [{"role": "user", "content": marks + question}]}


def images_of(record: Record, where: str) -> Sequence[Any]:
    images = record.get("images", ())
    if not isinstance(images, (list, tuple)):
        raise DataError(f"{where}: images must be a list, got {type(images).__name__}")
    return images


def judging(record: Record, where: str) -> dict[str, Any]:
    """What decides how the first answer is scored: task, references, choices and metric, checked."""
    gold = record["conversation"][1]["content"]
    form = record.get("form", "choice" if record.get("choices") else "open")
    choices = tuple(record.get("choices") or ())
    metric = record.get("metric") or "exact_match"
    if form not in ("choice", "open"):
        raise DataError(f"{where}: form must be choice or open, got {form!r}")
    if form == "choice" and (len({choice.strip() for choice in choices}) < max(2, len(choices)) or gold not in choices):
        raise DataError(
            f"{where}: a question with choices needs two or more different ones, among them its answer "
            f"{gold!r}; got {list(choices)!r}"
        )
    known = tuple(name for name in (*GENERATED, POOLED) if name != "choice_parse")
    if form == "open" and metric not in known:
        raise DataError(f"{where}: metric must be one of {', '.join(known)}, got {metric!r}")
    return {
        "task": str(record.get("task", "")),
        "references": tuple(record.get("references") or (gold,)),
        "choices": choices if form == "choice" else (),
        "metric": metric,
    }
