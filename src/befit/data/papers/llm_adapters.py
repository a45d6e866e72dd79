"""The commonsense questions as LLM-Adapters publishes them (Hu et al. 2023; AGI-Edgerunners/LLM-Adapters)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import ordered
from befit.data.papers.source import Place, Source, check_fields

FIELDS = ("instruction", "input", "output", "answer")
FOLDERS = {"arc_challenge": "ARC-Challenge", "arc_easy": "ARC-Easy"}  # the others are called as here
LLM_ADAPTERS = Source(
    "the repository AGI-Edgerunners/LLM-Adapters",
    "as the data sets in it",
    on_hub=False,
    layout="dataset/NAME/train.json and test.json",
)
_NAMES = re.compile(r"answer format:\s*(\S+(?:/\S+)+)\s*\Z", re.IGNORECASE)


def adapters_rows(place: Place, task: str, split: str) -> tuple[list[Row], str]:
    """Rows of `dataset/NAME/SPLIT.json` in an order of their own, and their hash.

    The repository's mixture of all of them, commonsense_170k.json, does not say which record is of which data set.
    """
    path = place.folder(LLM_ADAPTERS) / "dataset" / FOLDERS.get(task, task) / f"{split}.json"
    if not path.is_file():
        raise place.missing(path, LLM_ADAPTERS)
    rows = read_rows(path, FIELDS)
    check_fields(rows, FIELDS)
    return ordered(rows, FIELDS)


def as_published(row: Row, with_name_only: bool) -> dict[str, Any]:
    """A causal-lm record as `befit.data.papers.commonsense_tasks.rendered` has it, with the text of the file.

    The answers to choose from are those of the line "Answer format: answer1/answer2" with which the text ends. Raises
    DataError for a record without that line, or whose answer is not listed there or differs from its output.
    """
    instruction, answer = row.values["instruction"], row.values["answer"]
    extra, output = row.values["input"], row.values["output"]
    if not all(isinstance(value, str) for value in (instruction, answer, extra, output)):
        raise DataError(f"{row.where}: instruction, input, output and answer must be text")
    text = "\n".join(part for part in (instruction.strip(), extra.strip()) if part)
    if (match := _NAMES.search(text)) is None:
        raise DataError(
            f'{row.where}: instruction must end in a line such as "Answer format: answer1/answer2", got '
            f"{show(text[-60:])}"
        )
    names: Sequence[str] = match[1].split("/")
    if answer not in names or output.strip() != sentence(answer):
        raise DataError(
            f"{row.where}: answer must be one of {', '.join(names)}, and output {show(sentence(names[0]))} "
            f"and so on; got {show(answer)} and {show(output)}"
        )
    outputs = list(names) if with_name_only else [sentence(name) for name in names]
    chosen = outputs[names.index(answer)]
    return {"instruction": text, "output": chosen, "choices": outputs, "choice_names": list(names)}


def sentence(name: str) -> str:
    return f"the correct answer is {name}"
