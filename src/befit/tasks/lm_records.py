"""Rows of a user's file as `causal-lm` records in the forms of TRL: `messages`, `prompt` with `completion`, and `text`.

https://huggingface.co/docs/trl/dataset_formats has them. A record of one of these has `output` too, what is compared
with a generated answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show

FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
FIELDS = tuple(field for form in FORMS for field in form)
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def lm_record(values: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """A record with `messages`, with `prompt`, or with `text`, and in each `output`; None for a row of another form.

    columns  field of `FIELDS` to the name of its column, where that differs
    A row that has an instruction is of another form, as are all where `columns` names one, unless it names a field of
    one of these. Raises DataError that begins with `where`.
    """
    named = [form for form in FORMS if any(field in columns for field in form)]
    if not named and ("instruction" in values or not columns.keys().isdisjoint(("instruction", "output"))):
        return None
    complete = (form for form in named or FORMS if all(values.get(columns.get(f, f)) is not None for f in form))
    form = next(complete, None)
    if form is None:
        return None
    first, *others = (values[columns.get(field, field)] for field in form)
    if form[0] in ("messages", "conversations"):
        messages = turns(first, form[0], where)
        if messages[-1]["role"] != "assistant":
            raise DataError(f"{where}: the last of {form[0]} must be the assistant's, which is what is learnt")
        return {"messages": messages, "output": messages[-1]["content"]}
    for field, value in zip(form, (first, *others), strict=True):
        if not isinstance(value, str) or not value:
            more = "; write conversations as messages" if isinstance(value, list) else ""
            raise DataError(f"{where}: {field} must be a text that is not empty, got {show(value)}{more}")
    return {"prompt": first, "output": others[0]} if others else {"text": first, "output": ""}


def lm_input(value: Any, columns: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """An input to predict from in one of these forms, which need not have an answer; None for one of another form.

    An assistant's last message is left out: it is what is to be written. A text is gone on with. A prompt may be a
    list of messages too, as preferences have it.
    """
    if not isinstance(value, Mapping):
        return None
    for field in ("messages", "conversations", "prompt", "text"):
        content = value.get(columns.get(field, field), value.get(field))
        if content is None or "instruction" in value:
            continue
        if field == "text" or (field == "prompt" and not isinstance(content, list)):
            if not isinstance(content, str) or not content:
                raise DataError(f"{where}: {field} must be a text that is not empty, got {show(content)}")
            return {"prompt": content}
        messages = turns(content, field, where)
        return {"messages": messages[:-1] if messages[-1]["role"] == "assistant" else messages}
    return None


def turns(value: Any, name: str, where: str) -> list[dict[str, str]]:
    """The messages of a conversation as {role, content}; a system's stands first, if there is one."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: {name} must be a list of messages, got {show(value)}")
    messages = [_turn(turn, name, where) for turn in value]
    if any(turn["role"] == "system" for turn in messages[1:]):
        raise DataError(f"{where}: a system's message must be the first of {name}")
    if all(turn["role"] != "user" for turn in messages):
        raise DataError(f"{where}: {name} has no message of the user")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: {name} begins with the assistant's message, which answers nothing; leave it out")
    return messages


def _turn(turn: Any, name: str, where: str) -> dict[str, str]:
    if isinstance(turn, Mapping):
        role, text = (turn.get(key, turn.get(other)) for key, other in (("role", "from"), ("content", "value")))
        if isinstance(role, str) and role in ROLES and isinstance(text, str):
            if not text.strip():
                gap = "write it, or leave such records out (data.missing: drop)"
                raise DataError(f"{where}: a message of {role} in {name} is empty; {gap}")
            return {"role": ROLES[role], "content": text}
    raise DataError(
        f"{where}: each of {name} must be {{role: system, user or assistant, content: text}} or {{from: human or gpt, "
        f"value: text}}, got {show(turn)}"
    )
