"""Records of questions about images: their images, the texts around the answers, and how an answer is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from befit.core.errors import DataError
from befit.tasks.base import Record
from befit.tasks.prompts import chat_text, render, written
from befit.tasks.text_metrics import GENERATED
from befit.tasks.vqa_metrics import POOLED

MARK = "<image>"  # where an image stands in a record's text

Turns = Sequence[Mapping[str, str]]


def checked_turns(turns: Any, images: int, where: str) -> Turns:
    """The turns, if user and assistant alternate from a user's on and the users' texts have a mark for every image.

    Raises DataError.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError(f"{where}: conversation must be a list of turns, got {turns!r}")
    for number, turn in enumerate(turns):
        role = ("user", "assistant")[number % 2]
        if not isinstance(turn, Mapping) or turn.get("role") != role or not isinstance(turn.get("content"), str):
            raise DataError(
                f"{where}: turn {number + 1} of its conversation must be {{role: {role}, content: text}}, got {turn!r}"
            )
        if number % 2 and MARK in turn["content"]:
            raise DataError(f"{where}: turn {number + 1}, an answer, has the mark {MARK}; only questions hold images")
    marks = sum(turn["content"].count(MARK) for turn in turns)
    if marks != images:
        raise DataError(f"{where}: there are {marks} marks {MARK} for {images} images; every image has one, in order")
    return turns


def dialogue(
    turns: Turns, prompt: str, tokenizer: Any, image_token: str, where: str
) -> list[tuple[str, str | None, str]]:
    """For every question the text that stands before its answer (and after the answer before), the answer, and how the
    chat template ends it, which may be empty.

    prompt       "chat", a name of `befit.tasks.prompts.TEMPLATES` or a text with {instruction}
    image_token  the tokenizer's text for an image
    ->           [(before, answer, end), …]; the last answer is None where the last turn is a question

    With a template of befit's own every question is rendered by it, and follows the answer before at once. Raises
    DataError where a chat template does not go on from what it gave before.
    """
    answers: list[str | None] = [turn["content"] for turn in turns[1::2]]
    answers += [None] * (len(turns) % 2)
    if prompt != "chat":
        texts = [render(prompt, turn["content"]) for turn in turns[::2]]
        return [(text.replace(MARK, image_token), answer, "") for text, answer in zip(texts, answers, strict=True)]
    parts, done, end = list[tuple[str, str | None, str]](), "", ""
    for number, answer in enumerate(answers):
        whole = chat(tokenizer, turns[: 2 * number + 1], image_token)
        if not whole.startswith(done):
            raise DataError(
                f"{where}: the chat template of this model does not repeat the conversation so far before "
                f"turn {2 * number + 1}; set model.prompt: plain, or keep to one question"
            )
        if not whole.startswith(done + end):  # it ended the conversation, and not the answer
            parts[-1], end = (*parts[-1][:2], ""), ""
        before = whole[len(done + end) :]
        done = whole + (answer or "")
        end = _end(chat(tokenizer, turns[: 2 * number + 2], image_token), done, tokenizer.eos_token)
        parts.append((before, answer, end))
    return parts


def _end(whole: str, done: str, last: str | None) -> str:
    """What a chat template writes at the end of an answer, up to the token that ends it, if that is there.

    >>> _end("A: yes</s>\\n", "A: yes", "</s>"), _end("A: yes\\n", "A: yes", "</s>")
    ('</s>', '')
    """
    end = whole[len(done) :] if whole.startswith(done) else ""
    if last and last in end:
        return end[: end.index(last) + len(last)]
    return end if end.strip() else ""


def chat(tokenizer: Any, turns: Turns, image_token: str) -> str:
    """The conversation by the chat template, for texts or for lists of parts; up to where an answer is to follow if it
    ends with a question."""
    as_parts = _takes_parts(tokenizer, tokenizer.get_chat_template())
    messages = [
        {
            "role": turn["role"],
            "content": parts_of(turn["content"]) if as_parts else turn["content"].replace(MARK, image_token),
        }
        for turn in turns
    ]
    return chat_text(tokenizer, messages) if len(turns) % 2 else written(tokenizer, messages, tokenize=False)


@lru_cache(maxsize=8)
def _takes_parts(tokenizer: Any, template: str) -> bool:
    """Whether its template, which is this one, takes a content as a list of parts and not as a text."""
    return "probe" not in chat_text(tokenizer, [{"role": "user", "content": "probe"}])


def parts_of(text: str) -> list[dict[str, str]]:
    """A text with marks as the parts that templates of models with images take.

    >>> parts_of("<image>one<image>")
    [{'type': 'image'}, {'type': 'text', 'text': 'one'}, {'type': 'image'}]
    """
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


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
    """Task, references, choices and metric by which the first answer is scored, checked."""
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
    metrics = tuple(name for name in (*GENERATED, POOLED) if name != "choice_parse")
    if form == "open" and metric not in metrics:
        raise DataError(f"{where}: metric must be one of {', '.join(metrics)}, got {metric!r}")
    return {
        "task": str(record.get("task", "")),
        "references": tuple(record.get("references") or (gold,)),
        "choices": choices if form == "choice" else (),
        "metric": metric,
    }
