"""Rows of a user's file as `preference` records in the forms of TRL: a prompt, the answer that was chosen and the one
that was rejected, as texts or as messages, with the prompt apart or in front of both.

https://huggingface.co/docs/trl/dataset_formats has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show
from befit.tasks.lm_records import turns

SIDES = ("chosen", "rejected")


def preference_record(values: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """A record with what stands before both answers, `prompt` or `messages`, and the texts `chosen` and `rejected`;
    None for a row with an instruction.

    columns  `prompt`, `chosen` and `rejected` to the names of their columns, where those differ

    Without a column of prompts it is what both begin with. Raises DataError that begins with `where`.
    """
    if "prompt" not in columns and ("instruction" in values or "instruction" in columns):
        return None
    fields: list[Any] = [values.get(columns.get(field, field)) for field in ("prompt", *SIDES)]
    prompt, chosen, rejected = fields
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_messages(prompt, chosen, rejected, where)
    for field, value in zip(SIDES, (chosen, rejected), strict=True):
        if not isinstance(value, str) or not value:
            raise DataError(
                f"{where}: {columns.get(field, field)} must be a text that is not empty, or messages as the other "
                f"answer's, got {show(value)}"
            )
    name = columns.get("prompt", "prompt")
    if prompt is None and (name in values or "prompt" in columns):
        raise DataError(f"{where}: {name} is null" if name in values else f"{where}: there is no {name}")
    if prompt is None:
        alike = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if len({*pair}) > 1), len(chosen))
        prompt = str(chosen[: min(alike, len(rejected))]).removesuffix(" ")  # it belongs to the answers' first tokens
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{where}: needs instruction or prompt, or a column that data.columns.prompt names, or answers that begin "
            f"with the same prompt; its prompt is {show(prompt)}"
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _of_messages(prompt: Any, chosen: list[Any], rejected: list[Any], where: str) -> dict[str, Any]:
    before = prompt if isinstance(prompt, list) else []
    if isinstance(prompt, str) and len(chosen) == 1:
        before = [{"role": "user", "content": prompt}]  # else the conversations repeat it
    first, second = (turns([*before, *side], name, where) for name, side in zip(SIDES, (chosen, rejected), strict=True))
    if first[:-1] != second[:-1] or {first[-1]["role"], second[-1]["role"]} != {"assistant"}:
        raise DataError(
            f"{where}: chosen and rejected must be the same conversation but for the assistant's last message"
        )
    return {"messages": first[:-1], "chosen": first[-1]["content"], "rejected": second[-1]["content"]}
