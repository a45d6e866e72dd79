"""Rows of a user's file as `vqa` records, in LLaVA's form or befit's, with images and the answers to choose from.

Spellings are mapped here and nowhere else: `conversations` with {from, value} and `messages` are
`conversation` with {role, content}, `question` and `answer` are one of two turns, `image` is `images`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show

_SPELLED = ("conversation", "conversations", "messages", "question")
FIELDS = ("images", "image", *_SPELLED, "answer", "choices", "form", "metric", "task")
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
METRICS = {"F1": "token_f1_pooled", "RougeL": "rougeL"}  # as FedMosaic's scenario files have them
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAMED = re.compile(r"choice lists?:\s*\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", re.IGNORECASE)
_LINE = re.compile(r"^\s*\[(.*)\]\s*$", re.MULTILINE)
_LETTERED = re.compile(r"^\s*([A-Z])\. *(\S.*?)\s*$", re.MULTILINE)
_NUMBERED = re.compile(r"^\s*(\d{1,2})\. *(\S.*?)\s*$", re.MULTILINE)
_NUMBERS = [str(number) for number in range(1, 27)]
_IMAGES = re.compile(r"\b(Image (?:[A-Z]|\d{1,2})):")
_BY_ID = "Print only the answer with a single answer id"  # of WorldCuisines, always 1 to 5


def vqa_record(
    values: Mapping[str, Any], columns: Mapping[str, str], read_image: Callable[[Any], Any], where: str
) -> dict[str, Any]:
    """A record with `images`, `conversation`, `form`, and where it has them `choices`, `metric` and `task`.

    values      the row
    columns     field of `FIELDS` to the name of its column, where that differs
    read_image  checks one image and makes it what a task reads

    A question without `form` has choices where it names its own, or where its text lists some (see `choice_list`) and
    the first answer is among them. Raises DataError that begins with `where`.
    """
    record = vqa_fields(values, columns, read_image, where)
    turns = record["conversation"]
    if len(turns) % 2:
        raise DataError(f"{where}: the last turn is a question without an answer")
    gold, listed = turns[1]["content"], _field(values, columns, "choices")
    if listed is not None and (not isinstance(listed, list) or not all(isinstance(choice, str) for choice in listed)):
        raise DataError(f"{where}: choices must be a list of texts, got {show(listed)}")
    form = _field(values, columns, "form")
    if form not in (None, "choice", "open"):
        raise DataError(f"{where}: form must be choice or open, got {show(form)}")
    choices = tuple(listed) if listed else choice_list(turns[0]["content"], gold)
    if form is None:
        form = "choice" if choices and (listed or gold in choices) else "open"
    if form == "choice":
        if not choices:
            raise DataError(
                f"{where}: form is choice, and neither choices nor the first question, such as Choice "
                "list:[a, b], says between what"
            )
        if gold not in choices:
            raise DataError(f"{where}: the answer {gold!r} is not among its choices {list(choices)!r}")
        record["choices"] = list(choices)
    record["form"] = form
    for field in ("metric", "task"):
        value = _field(values, columns, field)
        if value is None:
            continue
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: {field} must be text, got {show(value)}")
        record[field] = METRICS.get(value, value) if field == "metric" else value
    return record


def vqa_fields(
    values: Mapping[str, Any], columns: Mapping[str, str], read_image: Callable[[Any], Any], where: str
) -> dict[str, Any]:
    """The images and the conversation of a row, which need not have an answer."""
    spelled = [name for name in _SPELLED if _field(values, columns, name)]
    pictured = [name for name in ("images", "image") if _field(values, columns, name) is not None]
    if len(spelled) != 1 or len(pictured) > 1:
        names = ", ".join([*spelled, *pictured]) or "neither"
        raise DataError(
            f"{where}: needs one of conversation, conversations, messages and question (with answer), and images or "
            f"image or none; it has {names}"
        )
    images = _field(values, columns, pictured[0]) if pictured else []
    images = images if isinstance(images, list) else [images]
    said = _field(values, columns, spelled[0])
    if spelled[0] == "question":
        said = _asked(said, _field(values, columns, "answer"), len(images), where)
    turns = [_turn(turn, where) for turn in _listed(said, spelled[0], where)]
    for number, turn in enumerate(turns):
        if turn["role"] != ("user", "assistant")[number % 2]:
            raise DataError(
                f"{where}: turn {number + 1} of {spelled[0]} is the {turn['role']}'s; they must alternate, "
                "the user's first"
            )
    marks = sum(turn["content"].count("<image>") for turn in turns)
    if marks != len(images):
        raise DataError(
            f"{where}: {spelled[0]} has {marks} marks <image> for {len(images)} images; every image needs one, in order"
        )
    return {"images": [read_image(image) for image in images], "conversation": turns}


def _asked(question: Any, answer: Any, images: int, where: str) -> list[dict[str, str]]:
    """A question and its answer as turns; images stand before a question that has no marks for them."""
    if not isinstance(question, str) or not (answer is None or isinstance(answer, str)):
        raise DataError(f"{where}: question and answer must be texts, got {show(question)} and {show(answer)}")
    marks = "" if "<image>" in question else "<image>" * images  # as befit.predict puts them
    turns = [{"role": "user", "content": marks + question}]
    return turns + [{"role": "assistant", "content": answer}] * (answer is not None)


def vqa_input(value: Any, columns: Mapping[str, str], where: str) -> Any:
    """A question as the task takes it; an image is a path that counts from the current folder."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(question := _field(value, columns, "question"), str):
        images = [_field(value, columns, name) for name in ("images", "image")]
        given = next((image for image in images if image is not None), [])
        return {**value, "question": question, "images": given if isinstance(given, list) else [given]}
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where}: must be a text, or an object with question or conversation and perhaps images, got {show(value)}"
        )
    return vqa_fields(value, columns, lambda image: image, where)


def choice_list(question: str, gold: str = "") -> tuple[str, ...] | None:
    """The answers that a question lists, in one of the spellings of FedMosaic's data (SNUMPR/DRAKE, SNUMPR/HFLB).

    `Choice list:[a, b]` and its variants, also as Python writes a list, a line that is a list in brackets, lines `A. …`
    or `1. …`, parts between `|`, `Image A: …, Image B: …`, ids from 1 to 5. Where `gold` is a letter, a number or an
    image's name and no part, those of the parts are the answers.

    >>> choice_list("Is it red? Choice list:[yes, no]"), choice_list("Which? A. cat\\nB. dog", "B"), choice_list("Why?")
    (('yes', 'no'), ('A', 'B'), None)
    >>> choice_list("Choice lists: ['yes', 'no']."), choice_list("1. rice\\n2. soup", "2")
    (('yes', 'no'), ('1', '2'))
    >>> choice_list("Choice list:[Image A: rice, Image B: soup]", "Image B")
    ('Image A', 'Image B')
    """
    parts = listed_parts(question)
    if len(parts) < 2:
        return None
    numbers = [_NUMBERS] if _NUMBERED.search(question) else []
    for names in (_LETTERS, *numbers, *([f"Image {name}" for name in names] for names in (_LETTERS, _NUMBERS))):
        if gold in (called := tuple(names[: len(parts)])) and gold not in parts:
            return called  # the parts may then be pictures, which all read alike
    return None if len({part for part in parts if part}) < len(parts) else tuple(parts)


def listed_parts(question: str) -> list[str]:
    """The parts of the list in a question, as they stand there; empty without one."""
    if (match := _NAMED.search(question)) or (match := _LINE.search(question)):
        return _split(match[1])
    if enumerated := _enumerated(question):
        return enumerated
    if question.count("|") > 1:
        return [part.strip() for part in question[question.rfind("\n") + 1 :].split("|")]
    images = list(dict.fromkeys(_IMAGES.findall(question)))
    return images if len(images) > 1 else _NUMBERS[:5] if _BY_ID in question else []


def _split(text: str) -> list[str]:
    """What stands between brackets: a list as Python writes it, parts between `|` if there are three, else commas."""
    text = text.strip()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if inner[:1] in ("'", '"'):
        try:
            found = ast.literal_eval(f"[{inner}]")
        except (SyntaxError, ValueError):
            found = []
        if found and all(isinstance(part, str) for part in found):
            return [part.strip() for part in found]
    return [part.strip() for part in text.split("|" if text.count("|") > 1 else ",")]


def _enumerated(question: str) -> list[str]:
    """The texts of lines that begin with A., B., and so on, or with 1., 2.; the first may stand after other text in its
    line."""
    for pattern, first, names in ((_LETTERED, "A", _LETTERS), (_NUMBERED, "1", _NUMBERS)):
        lines = pattern.findall(re.sub(rf"(?<=\S) +{first}\. ", f"\n{first}. ", question))
        marks = [mark for mark, _ in lines]
        # Ahead of them a line may begin with an initial.
        listed = marks[max((place for place, mark in enumerate(marks) if mark == first), default=0) :]
        if listed and listed == [*names[: len(listed)]]:
            return [text for _, text in lines[-len(listed) :]]
    return []


def _field(values: Mapping[str, Any], columns: Mapping[str, str], field: str) -> Any:
    return values.get(columns.get(field, field))


def _listed(value: Any, name: str, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} must be a list of turns, got {show(value)}")
    return value


def _turn(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: a turn must be {{role, content}} or {{from, value}}, got {show(turn)}")
    role, text = (turn.get(key, turn.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or role not in ROLES or not isinstance(text, str) or not text.strip():
        raise DataError(
            f"{where}: a turn must be {{role: user or assistant, content: text}} or {{from: human or gpt, "
            f"value: text}}, got {show(dict(turn))}"
        )
    return {"role": ROLES[role], "content": text}
