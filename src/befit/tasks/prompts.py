"""What a language model reads before the answer: a template of its own, or one of those that people use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from befit.core.errors import DataError

_ALPACA = {
    True: "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n",
}
_PLAIN = {
    True: "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    False: "### Instruction:\n{instruction}\n\n### Response:\n",
}
# With an input, and without one.
TEMPLATES: Mapping[str, Mapping[bool, str]] = {"plain": _PLAIN, "alpaca": _ALPACA}
CHATS = ("chat", "chat-bos")  # the tokenizer's template, and that after one more beginning-of-sequence token
PROMPTS = ("auto", *CHATS, *TEMPLATES)
# The day of templates that tell a model the date: Llama 3's fall back to it, and others ask for today's in a form of
# their own. A template is given texts and lists of them alone, so the parts of a form are written here.
_DAY = datetime(2024, 7, 26)
_PARTS = {part: _DAY.strftime(part) for part in (f"%{sign}" for sign in "AaBbcdefHIjMmpSUuWwXxYyZz")} | {"%-d": "26"}
_THAT_DAY = (
    "{% macro strftime_now(form) %}{% set made = namespace(text=form) %}{% for part, text in parts_of_day.items() %}"
    "{% set made.text = made.text | replace(part, text) %}{% endfor %}{{ made.text }}{% endmacro %}"
)

_ANSWER = "An answer."  # any: to see what a template writes before it


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation in the tokenizer's template, up to where the content of an answer begins.

    A template that writes the date gets one that never changes: a run would else read other prompts on another day.
    """
    return _begun(tokenizer, messages)[0]


def _begun(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The same, and as far as the template makes the assistant answer, which may be less.

    Between the two stands what the template writes before the content of an answer, such as an empty thought of Qwen3's
    or the header of a template that never asks. Blanks alone are left to the answer, with which they may be one token.
    """
    asked = written(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    told = written(tokenizer, [*messages, {"role": "assistant", "content": _ANSWER}], tokenize=False)
    opening, found, _ = told.removeprefix(asked).partition(_ANSWER)
    return (asked + opening if told.startswith(asked) and found and opening.strip() else asked), asked


def written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """What the tokenizer's template makes of a conversation, on the same day whenever that is."""
    template = _THAT_DAY + tokenizer.get_chat_template()
    return tokenizer.apply_chat_template(
        messages, chat_template=template, date_string=f"{_DAY:%d %b %Y}", parts_of_day=_PARTS, **options
    )


def conversation_runs(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], tokens: Callable[[str], list[int]], where: str
) -> list[tuple[list[int], bool]]:
    """A conversation in the tokenizer's template, as stretches of tokens that are learnt or are not, in turn.

    tokens  of a piece of text, none added
    ->      ends with the assistant's last message, or with what makes the assistant answer the user's

    Learnt is what the template puts between `{% generation %}` and `{% endgeneration %}`, without what makes the
    assistant answer, which some templates put there too. Where these marks are missing, or hold nothing, it is by how
    much the conversation grows with each of the assistant's messages, from where the content is to begin; where the
    template writes earlier answers in another way than the last, they are learnt as they stand before the last. The
    pieces are then tokenised each on its own. Raises DataError where earlier answers cannot be found.
    """
    from jinja2 import TemplateError

    asks = messages[-1]["role"] != "assistant"
    try:
        if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
            if asks:
                return [(tokens(chat_text(tokenizer, messages)), False)]
            read = written(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, learnt = read["input_ids"], [bool(mask) for mask in read["assistant_masks"]]
            for place in _answered(messages):
                before = len(tokens(written(tokenizer, messages[:place], tokenize=False)))
                begun = map(tokens, _begun(tokenizer, messages[:place]))
                asked = next((len(text) for text in begun if ids[: len(text)] == text), before)
                learnt[before:asked] = [False] * (asked - before)
            if any(learnt):  # transformers before 5.24 finds no mark that begins with what is no token, such as a blank
                marked = groupby(zip(ids, learnt, strict=True), lambda pair: pair[1])
                runs = [([token for token, _ in run], of_answer) for of_answer, run in marked]
                return runs if runs[-1][1] else runs[:-1]
        pieces = _grown(tokenizer, messages) or _rewritten(tokenizer, messages)
        if pieces is None:
            raise DataError(
                f"{where}: the chat template of this model rewrites a conversation that goes on, so that its earlier "
                "answers cannot be found, and marks no {% generation %}; give one answer a record, or another tokenizer"
            )
    except DataError:
        raise
    except (TemplateError, ValueError) as error:
        raise DataError(f"{where}: the chat template of this model refuses it: {error}") from error
    return [(tokens(text), learnt) for text, learnt in pieces if text]


def _answered(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Where the assistant's messages stand."""
    return [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]


def _grown(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]] | None:
    """A conversation in pieces that are learnt or are not; None where the template rewrites what came before."""
    pieces, done = list[tuple[str, bool]](), ""
    asks = messages[-1]["role"] != "assistant"
    for place in [*_answered(messages), *[len(messages)] * asks]:
        begun = _begun(tokenizer, messages[:place])
        before = after = begun[0]
        if place < len(messages):
            after = written(tokenizer, messages[: place + 1], tokenize=False)
            # A message with a thought of its own stands where the template makes the assistant answer.
            before = next(filter(after.startswith, begun), "")
        if not before or not before.startswith(done):
            return None
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return pieces


def _rewritten(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]] | None:
    """The same pieces from the whole conversation at once, for templates that write earlier answers differently from
    the last, such as those of Qwen3 and gpt-oss; None where earlier answers cannot be found.

    The template also writes the conversation with known texts in place of the earlier answers. What stands between
    these shows where the real answers begin and end. An earlier answer is learnt with the end of its turn only if the
    last answer ends the same way, as that is what the model is to write.
    """
    last = len(messages) - (messages[-1]["role"] == "assistant")
    marks = {place: f"An answer at {place}." for place in _answered(messages[:last])}
    marked = [{**turn, "content": marks.get(place, turn["content"])} for place, turn in enumerate(messages[:last])]
    whole = written(tokenizer, messages, tokenize=False) if last < len(messages) else ""
    begun = zip(_begun(tokenizer, messages[:last]), _begun(tokenizer, marked), strict=True)
    before, around = next((pair for pair in begun if not whole or whole.startswith(pair[0])), ("", ""))
    first, *others = re.split("|".join(map(re.escape, marks.values())), around)
    if not before.startswith(first) or len(others) != len(marks):
        return None
    answered = written(tokenizer, [*messages[:last], {"role": "assistant", "content": _ANSWER}], tokenize=False)
    end = answered.rpartition(_ANSWER)[2]
    pieces, done = [(first, False)], len(first)
    for number, text in enumerate(others, start=1):
        start = before.find(text, done) if number < len(others) else len(before) - len(text)
        if start < done or not before.startswith(text, start):
            return None
        ended = len(end) if text.startswith(end) else 0
        pieces += [(before[done : start + ended], True), (text[ended:], False)]
        done = start + len(text)
    return [*pieces, (whole[len(before) :], True)]


def render(prompt: str, instruction: str, extra: str = "") -> str:
    """The prompt of a template: a name of `TEMPLATES`, or a text with {instruction} and {input}.

    Nothing else in a text is special, so that braces in it stay as they are.

    >>> render("Q: {instruction} {input}\\nA:", "Add.", "1 + {x}")
    'Q: Add. 1 + {x}\\nA:'
    >>> render("plain", "Translate to French.", "good day")
    '### Instruction:\\nTranslate to French.\\n\\n### Input:\\ngood day\\n\\n### Response:\\n'
    """
    text = TEMPLATES[prompt][bool(extra)] if prompt in TEMPLATES else prompt
    fields = {"instruction": instruction, "input": extra}
    return re.sub(r"\{(instruction|input)\}", lambda match: fields[match[1]], text)


def prompt_problem(prompt: str) -> str:
    """Why a setting is no prompt; empty where it is one."""
    if prompt in PROMPTS or "{instruction}" in prompt:
        return ""
    return f"must be {', '.join(PROMPTS)}, or a text with {{instruction}} and perhaps {{input}}"
