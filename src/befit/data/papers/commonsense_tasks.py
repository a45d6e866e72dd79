"""The eight commonsense data sets as questions with named options; the line of allowed answers is LLM-Adapters'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show
from befit.data.files.readers import Row
from befit.data.papers.source import Source, text_of

CONVERTED = "*/{split}/*.parquet"  # of branches that the hub converted: CONFIG/SPLIT/0000.parquet


@dataclass(frozen=True)
class Question:
    """A question with its options; `answer` counts from 0. `options` is empty where their names say all."""

    text: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class CommonsenseTask:
    """A data set.

    sentence  what it asks
    option    name of an option, to which its number is added; ("true", "false") are names of their own
    fields    columns that are read
    test      split that has labels to test on
    question  a row's question
    """

    name: str
    source: Source
    sentence: str
    option: str
    fields: tuple[str, ...]
    test: str
    question: Callable[[Row], Question]

    def names(self, count: int) -> list[str]:
        return ["true", "false"] if self.option == "" else [f"{self.option}{number + 1}" for number in range(count)]


def rendered(task: CommonsenseTask, question: Question, with_name_only: bool) -> dict[str, Any]:
    """A causal-lm record: what is asked, the options, a line naming the allowed answers; the answer as a sentence.

    `choices` are the outputs of all options, for scoring by likelihood; an answer names one by its name alone, in a
    sentence or not (`choice_names`).
    """
    names = task.names(len(question.options) or 2)
    options = [f"{name}: {text}" for name, text in zip(names, question.options, strict=False)]
    lines = [
        task.sentence,
        "",
        question.text,
        *([""] if options else []),
        *options,
        "",
        f"Answer format: {'/'.join(names)}",
    ]
    outputs = names if with_name_only else [f"the correct answer is {name}" for name in names]
    return {
        "instruction": "\n".join(lines),
        "output": outputs[question.answer],
        "choices": outputs,
        "choice_names": names,
    }


def one_of(row: Row, field: str, options: Mapping[Any, int]) -> int:
    """The option that a label means. Empty labels and -1 are those of unlabelled test splits, and refused."""
    value = row.values[field]
    if isinstance(value, (str, int, bool)) and (type(value), value) in {(type(key), key) for key in options}:
        return options[value]
    raise DataError(f"{row.where}: {field} must be one of {', '.join(map(show, options))}, got {show(value)}")


def lettered(stem: str) -> Callable[[Row], Question]:
    """ARC and OpenBookQA: choices {text, label} and the label of the right one, which may be a letter or a digit."""

    def question(row: Row) -> Question:
        choices = row.values["choices"]
        if not isinstance(choices, Mapping) or not {"text", "label"} <= set(choices):
            raise DataError(f"{row.where}: choices must be {{text: [...], label: [...]}}, got {show(choices)}")
        labels, texts = list(choices["label"]), [str(option).strip() for option in choices["text"]]
        if len(labels) != len(texts) or len(texts) < 2:
            raise DataError(f"{row.where}: choices has {len(texts)} texts and {len(labels)} labels")
        return Question(
            text_of(row, stem), tuple(texts), one_of(row, "answerKey", {label: at for at, label in enumerate(labels)})
        )

    return question


def boolq(row: Row) -> Question:
    return Question(text_of(row, "question"), (), one_of(row, "answer", {True: 0, False: 1}))


def hellaswag(row: Row) -> Question:
    endings = row.values["endings"]
    if not isinstance(endings, Sequence) or isinstance(endings, str) or len(endings) != 4:
        raise DataError(f"{row.where}: endings must be four texts, got {show(endings)}")
    start = f"{text_of(row, 'activity_label')}: {text_of(row, 'ctx')}"
    return Question(
        start, tuple(str(ending).strip() for ending in endings), one_of(row, "label", {str(at): at for at in range(4)})
    )


def piqa(row: Row) -> Question:
    return Question(
        text_of(row, "goal"), (text_of(row, "sol1"), text_of(row, "sol2")), one_of(row, "label", {0: 0, 1: 1})
    )


def social(row: Row) -> Question:
    options = tuple(text_of(row, f"answer{letter}") for letter in "ABC")
    return Question(
        f"{text_of(row, 'context')} {text_of(row, 'question')}", options, one_of(row, "label", {"1": 0, "2": 1, "3": 2})
    )


def winogrande(row: Row) -> Question:
    sentence = text_of(row, "sentence")
    if "_" not in sentence:
        raise DataError(f"{row.where}: sentence must have a gap _, got {show(sentence)}")
    return Question(
        sentence, (text_of(row, "option1"), text_of(row, "option2")), one_of(row, "answer", {"1": 0, "2": 1})
    )


CORRECT = "Choose the correct answer to the question."
TASKS = (
    *(
        CommonsenseTask(
            config.lower().replace("-", "_"),
            Source("allenai/ai2_arc", "CC BY-SA", "ai2_arc", config),
            CORRECT,
            "answer",
            ("question", "choices", "answerKey"),
            "test",
            lettered("question"),
        )
        for config in ("ARC-Challenge", "ARC-Easy")
    ),
    CommonsenseTask(
        "boolq",
        Source("google/boolq", "CC BY-SA", "boolq"),
        "Answer the question with true or false.",
        "",
        ("question", "answer", "passage"),
        "validation",
        boolq,
    ),
    CommonsenseTask(
        "hellaswag",
        Source("Rowan/hellaswag", "MIT", "hellaswag"),
        "Choose the ending that completes the text.",
        "ending",
        ("activity_label", "ctx", "endings", "label"),
        "validation",
        hellaswag,
    ),
    CommonsenseTask(
        "openbookqa",
        Source("allenai/openbookqa", "as its authors state", "openbookqa", "main"),
        CORRECT,
        "answer",
        ("question_stem", "choices", "answerKey"),
        "test",
        lettered("question_stem"),
    ),
    CommonsenseTask(
        "piqa",
        Source("ybisk/piqa", "AFL-3.0", "piqa", "", "refs/convert/parquet", CONVERTED),
        "Choose the solution that reaches the goal.",
        "solution",
        ("goal", "sol1", "sol2", "label"),
        "validation",
        piqa,
    ),
    CommonsenseTask(
        "social_i_qa",
        Source("allenai/social_i_qa", "as its authors state", "social_i_qa", "", "refs/convert/parquet", CONVERTED),
        CORRECT,
        "answer",
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        "validation",
        social,
    ),
    CommonsenseTask(
        "winogrande",
        Source("allenai/winogrande", "Apache-2.0", "winogrande", "winogrande_xl"),
        "Choose what belongs into the gap of the sentence.",
        "option",
        ("sentence", "option1", "option2", "answer"),
        "validation",
        winogrande,
    ),
)
