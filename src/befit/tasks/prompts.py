"""What a language model reads before the answer: a template of its own, or one of those that people use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
# What templates that tell a model the date write where nobody says which: Llama 3's fall back to this day.
_DATE = "26 Jul 2024"


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation in the tokenizer's template, up to where the answer begins.

    A template that writes the date gets one that never changes: a run would else read other prompts on another day.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=_DATE)


def render(prompt: str, instruction: str, extra: str = "") -> str:
    """The prompt of a template: a name of `TEMPLATES`, or a text with {instruction} and {input}.

    Nothing else in a text is special, so that braces in it stay as they are.

    >>> render("Q: {instruction} {input}\\nA:", "Add.", "1 + {x}")
    'Q: Add. 1 + {x}\\nA:'
    """
    text = TEMPLATES[prompt][bool(extra)] if prompt in TEMPLATES else prompt
    fields = {"instruction": instruction, "input": extra}
    return re.sub(r"\{(instruction|input)\}", lambda match: fields[match[1]], text)


def plain_prompt(instruction: str, extra: str = "") -> str:
    """The prompt of a model without a chat template.

    >>> plain_prompt("Translate to French.", "good day")
    '### Instruction:\\nTranslate to French.\\n\\n### Input:\\ngood day\\n\\n### Response:\\n'
    """
    return render("plain", instruction, extra)


def prompt_problem(prompt: str) -> str:
    """Why a setting is no prompt; empty where it is one."""
    if prompt in PROMPTS or "{instruction}" in prompt:
        return ""
    return f"must be {', '.join(PROMPTS)}, or a text with {{instruction}} and perhaps {{input}}"
