"""Tasks: image and text classification, language modelling, questions about images. Torch comes with the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from befit.core.errors import ConfigError, did_you_mean
from befit.tasks.meteor import unavailable

if TYPE_CHECKING:
    from befit.tasks.base import Task

TASKS = ("image-classification", "text-classification", "causal-lm", "vqa")
GENERATIVE = ("causal-lm", "vqa")  # tasks whose models write text: they have no classes, and no head but the vocabulary

__all__ = ["GENERATIVE", "TASKS", "make_task"]


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
) -> Task:
    """The task `name`, one of `TASKS`.

    processor       `Backbone.processor`: a tokenizer, an `ImagePreprocessor` for images, a `VqaProcessor` for both
    label_names     the classes in order; none for causal-lm and vqa
    max_length      tokens per example, at most what the model has positions for; no meaning for images
    generate        causal-lm: answer every prompt greedily when evaluating (exact match and ROUGE-L)
    max_new_tokens  causal-lm, vqa: the longest generated answer
    metrics         causal-lm, vqa: what is measured, the headline first; empty: exact_match and rougeL with `generate`,
                    or vqa_score
    prompt          causal-lm, vqa: how a record becomes a prompt, see `befit.tasks.causal_lm.CausalLM`
    long_prompts    causal-lm: whether a prompt that fills max_length is an error or left out of training

    Raises ConfigError for an unknown name, a missing processor, and label names or a prompt that do not fit the task.
    """
    if name not in TASKS:
        raise ConfigError([f"task: {name!r} is not one of {', '.join(TASKS)}.{did_you_mean(name, TASKS)}"])
    if problems := _problems(name, processor, label_names, max_length, prompt, long_prompts) + unavailable(metrics):
        raise ConfigError(problems, f"the task {name}")
    if name == "image-classification":
        from befit.tasks.image_classification import ImageClassification

        return ImageClassification(processor, label_names)
    if name == "text-classification":
        from befit.tasks.text_classification import TextClassification

        return TextClassification(processor, label_names, max_length)
    if name == "vqa":
        from befit.tasks.vqa import VQA

        return VQA(processor, max_length, max_new_tokens=max_new_tokens, metrics=metrics, prompt=prompt)
    from befit.tasks.causal_lm import CausalLM

    return CausalLM(
        processor,
        max_length,
        generate=generate,
        max_new_tokens=max_new_tokens,
        metrics=metrics,
        prompt=prompt,
        long_prompts=long_prompts,
    )


def _problems(
    name: str, processor: Any, label_names: Sequence[str], max_length: int, prompt: str, long_prompts: str
) -> list[str]:
    problems = []
    if name == "image-classification":
        from befit.tasks.images import ImagePreprocessor

        if not isinstance(processor, ImagePreprocessor):
            problems.append(f"processor: images need an ImagePreprocessor, got {type(processor).__name__}")
    elif name == "vqa":
        from befit.tasks.vqa_examples import VqaProcessor

        if not isinstance(processor, VqaProcessor):
            problems.append(f"processor: images and text need a VqaProcessor, got {type(processor).__name__}")
    elif getattr(processor, "pad_token_id", None) is None:
        problems.append(f"processor: a tokenizer with a padding token is needed, got {type(processor).__name__}")
    if name in GENERATIVE:
        if label_names:
            problems.append(f"label_names: {name} has no classes, got {', '.join(label_names)}")
    elif len(set(label_names)) != len(label_names) or len(label_names) < 2:
        problems.append(f"label_names: at least two different names are needed, got {list(label_names)}")
    if name not in GENERATIVE and prompt != "auto":
        problems.append(f"model.prompt: {name} has no prompts; leave it out")
    if name != "causal-lm" and long_prompts != "refuse":
        problems.append(f"model.long_prompts: is for causal-lm, and the task is {name}; leave it out")
    if max_length < (least := _fewest_tokens(name, processor)):
        problems.append(f"model.max_length: must be at least {least} tokens, got {max_length}")
    return problems


def _fewest_tokens(name: str, tokenizer: Any) -> int:
    """Room for one token beside those that the tokenizer adds to every text, or for a prompt and an answer."""
    if name != "text-classification" or not hasattr(tokenizer, "num_special_tokens_to_add"):
        return 2
    return max(2, 1 + tokenizer.num_special_tokens_to_add(pair=False))
