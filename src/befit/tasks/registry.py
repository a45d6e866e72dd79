"""The tasks by name: what befit knows of a task before it reads a model or a record. Imports no torch.

A task is one file, befit's own or a user's:

    @register_task("stars", auto_class="AutoModelForSequenceClassification", peft_type="SEQ_CLS",
                   fields=("text", "label"))
    class Stars(TextClassification):
        name = "stars"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from befit.core.errors import UNNAMED, ConfigError
from befit.core.names import several
from befit.core.registry import Registry, check_name
from befit.tasks.meteor import unavailable

if TYPE_CHECKING:
    from befit.tasks.base import Task

Factory = TypeVar("Factory", bound=Callable[..., Any] | str)


@dataclass(frozen=True)
class TaskKind:
    """What a task says of itself.

    name         as in `data.task` and `Federation.task`
    factory      makes the `Task` of a processor and of those settings of `make_task` that its signature names; or
                 where it is, as "module:name", which is imported when it is first needed
    auto_class   the class of transformers that loads its models
    processor    what stands before its models: a tokenizer, an `ImagePreprocessor`, or a `VqaProcessor` for both
    peft_type    PEFT's `task_type` of its adapters; None where PEFT has none
    fields       what every record has. `label` is a class, `image` a picture, and any other field a text
    optional     texts that the records may have
    lists        lists of texts, read only where `data.columns` says from which column: many data sets have columns of
                 these names that hold something else
    answer       the field that a model answers with, which an input to predict from does not have
    has_classes  whether the answer is one of `data.label_names`
    writes_text  whether the model writes its answer: then it has no head but the vocabulary
    metrics      what `evaluate.metrics` may name
    read_record  makes a record of a row, for tasks whose fields have several spellings. Takes the row's values, the
                 columns by field, a function that checks one image, and where the row stands, for errors
    read_input   the same for an input to predict from: takes the input, the columns by field, and where it stands
    other_fields  of records in other forms than that of `fields`
    other_record  makes a record of a row in one of those forms, None of one that is in none of them. Takes the row's
                 values, the columns by field, and where the row stands
    other_input  the same for an input to predict from
    """

    name: str
    factory: Callable[..., Any] | str
    auto_class: str
    processor: Literal["tokenizer", "images", "images and text"] = "tokenizer"
    peft_type: str | None = None
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    answer: str = "label"
    has_classes: bool = True
    writes_text: bool = False
    metrics: tuple[str, ...] = ()
    read_record: Callable[[Mapping[str, Any], Mapping[str, str], Callable[[Any], Any], str], dict[str, Any]] | None = (
        None
    )
    read_input: Callable[[Any, Mapping[str, str], str], Any] | None = None
    other_fields: tuple[str, ...] = ()
    other_record: Callable[[Mapping[str, Any], Mapping[str, str], str], dict[str, Any] | None] | None = None
    other_input: Callable[[Any, Mapping[str, str], str], dict[str, Any] | None] | None = None

    def __post_init__(self) -> None:
        several(fields=self.fields, optional=self.optional, lists=self.lists, metrics=self.metrics)

    @cached_property
    def make(self) -> Callable[..., Task]:
        """The factory itself; imports it where only its place is known."""
        if not isinstance(self.factory, str):
            return self.factory
        module, name = self.factory.split(":")
        return getattr(import_module(module), name)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that the factory takes beside its processor."""
        return tuple(inspect.signature(self.make).parameters)[1:]


TASKS: Registry[TaskKind] = Registry("task", (), "befit.tasks")


def register_task(name: str, **declared: Any) -> Callable[[Factory], Factory]:
    """Enter a task under `name`; what may be declared is in `TaskKind`.

    Raises ValueError where another task has that name, and TypeError for a name that is no text.
    """
    check_name(name, "register_task")

    def enter(factory: Factory) -> Factory:
        TASKS.enter(name, factory, TaskKind(name, factory, **declared))
        return factory

    return enter


def task_names(writes_text: bool | None = None) -> list[str]:
    """The names of all tasks, or of those whose models write text or do not, in the order of their registration."""
    TASKS.load()
    return [name for name, kind in TASKS.items() if writes_text in (None, kind.writes_text)]


def get_task(name: str, key: str = "task") -> TaskKind:
    """The task called `name`. Raises ConfigError with a suggestion; `key` is where the name was given."""
    return TASKS.find(name, key, UNNAMED)


def make_task(
    name: str,
    processor: Any,
    label_names: Sequence[str] = (),
    *,
    max_length: int = 256,
    generate: bool = False,
    max_new_tokens: int = 128,
    metrics: Sequence[str] = (),
    prompt: str = "auto",
    long_prompts: Literal["refuse", "drop"] = "refuse",
    dpo_beta: float = 0.1,
) -> Task:
    """The task `name`, one of `task_names()`. Its factory gets those of these settings that its signature names.

    processor       `Backbone.processor`: a tokenizer, an `ImagePreprocessor` for images, a `VqaProcessor` for both
    label_names     the classes in order; none for tasks without classes
    max_length      tokens per example, at most what the model has positions for; no meaning for images
    generate        causal-lm, preference: answer every prompt greedily when evaluating (exact match and ROUGE-L)
    max_new_tokens  causal-lm, preference, vqa: the longest generated answer
    metrics         what is measured, the headline first; empty: accuracy, of causal-lm exact_match and rougeL with
                    `generate`, of vqa vqa_score
    prompt          causal-lm, preference, vqa: how a record becomes a prompt, see `befit.tasks.causal_lm.CausalLM`
    long_prompts    causal-lm, preference: whether a prompt that fills max_length is an error or left out of training
    dpo_beta        preference: how near the model is held to the reference

    Raises ConfigError for an unknown name, a missing processor, and label names or a prompt that do not fit the task.
    """
    kind = get_task(name)
    settings = {
        "label_names": label_names,
        "max_length": max_length,
        "generate": generate,
        "max_new_tokens": max_new_tokens,
        "metrics": metrics,
        "prompt": prompt,
        "long_prompts": long_prompts,
        "dpo_beta": dpo_beta,
    }
    problems = _problems(kind, processor, label_names, max_length)
    problems += [
        f"{key}: {name} has no such setting; leave it out"
        for key, usual in (("model.prompt", "auto"), ("model.long_prompts", "refuse"), ("train.dpo_beta", 0.1))
        if (setting := key.partition(".")[2]) not in kind.settings and settings[setting] != usual
    ]
    if problems := problems + unavailable(metrics):
        raise ConfigError(problems, f"the task {name}")
    task = kind.make(processor, **{key: value for key, value in settings.items() if key in kind.settings})
    if len(task.metric.split()) != 1:  # scores are called "metric r4 of group", so a name of several words is no name
        raise ConfigError([f"metric: must be one word, got {task.metric!r}"], f"the task {name}")
    return task


def _problems(kind: TaskKind, processor: Any, label_names: Sequence[str], max_length: int) -> list[str]:
    problems = []
    if kind.processor == "images":
        from befit.tasks.images import ImagePreprocessor

        if not isinstance(processor, ImagePreprocessor):
            problems.append(f"processor: images need an ImagePreprocessor, got {type(processor).__name__}")
    elif kind.processor == "images and text":
        from befit.tasks.vqa_examples import VqaProcessor

        if not isinstance(processor, VqaProcessor):
            problems.append(f"processor: images and text need a VqaProcessor, got {type(processor).__name__}")
    elif getattr(processor, "pad_token_id", None) is None:
        problems.append(f"processor: a tokenizer with a padding token is needed, got {type(processor).__name__}")
    if not kind.has_classes:
        if label_names:
            problems.append(f"label_names: {kind.name} has no classes, got {', '.join(label_names)}")
    elif len(set(label_names)) != len(label_names) or len(label_names) < 2:
        problems.append(f"label_names: at least two different names are needed, got {list(label_names)}")
    if max_length < (least := _fewest_tokens(kind, processor)):
        problems.append(f"model.max_length: must be at least {least} tokens, got {max_length}")
    return problems


def _fewest_tokens(kind: TaskKind, tokenizer: Any) -> int:
    """Room for one token beside those that the tokenizer adds to every text, or for a prompt and an answer."""
    if kind.writes_text or not hasattr(tokenizer, "num_special_tokens_to_add"):
        return 2
    return max(2, 1 + tokenizer.num_special_tokens_to_add(pair=False))
