"""Supervised fine-tuning of a causal language model: an instruction, perhaps an input, and the answer to learn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.instance import input_ends
from befit.errors import DataError
from befit.tasks.base import (
    Batch,
    Examples,
    Record,
    Reduction,
    Task,
    batches,
    draw,
    inference,
    model_device,
    record_name,
)
from befit.tasks.examples import PaddedExamples, pad_right
from befit.tasks.generation import greedy, stop_tokens
from befit.tasks.text_metrics import compare

logger = logging.getLogger(__name__)

__all__ = ["CausalLM", "plain_prompt"]

IGNORED = -100


class CausalLM(Task):
    """Records hold `instruction`, perhaps `input`, and `output`.

    The prompt is one user turn of the tokenizer's chat template (instruction, blank line, input), or `plain_prompt`
    where it has none. The answer and the end-of-sequence token follow; only they are learnt. Prompt and answer are
    tokenised apart, so that training and generation see the same prompt tokens. Longer sequences lose their end: the
    first `prepare` that cuts any says so in the log, `truncated` counts them.

    generate        also answer each prompt greedily in `evaluate` (many forward passes per example)
    max_new_tokens  the longest answer that is generated
    """

    name: ClassVar[str] = "causal-lm"

    def __init__(
        self, tokenizer: Any, max_length: int = 256, *, generate: bool = False, max_new_tokens: int = 128
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.generate = generate
        self.max_new_tokens = max_new_tokens
        self.metric = "exact_match" if generate else "token_accuracy"
        self.truncated = 0

    def prepare(self, records: Sequence[Record]) -> PaddedExamples:
        prompts = [self.prompt_tokens(record, record_name(record, row)) for row, record in enumerate(records)]
        sequences, labels, cut = [], [], 0
        for position, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
            where = record_name(record, position)
            answer = self._answer_tokens(record, where)
            if len(prompt) >= self.max_length:
                raise DataError(
                    f"{where}: its prompt has {len(prompt)} tokens, and nothing of its answer is left within "
                    f"{self.max_length}. Raise model.max_length, shorten the record or drop it"
                )
            cut += len(prompt) + len(answer) > self.max_length
            sequences.append([*prompt, *answer][: self.max_length])
            labels.append([*[IGNORED] * len(prompt), *answer][: self.max_length])
        if cut and not self.truncated:
            logger.warning(
                "%d of %d answers were cut at %d tokens (said once); raise model.max_length to keep them whole",
                cut, len(records), self.max_length,
            )  # fmt: skip
        self.truncated += cut
        return PaddedExamples(
            sequences={
                "input_ids": pad_right(sequences, self.tokenizer.pad_token_id),
                "labels": pad_right(labels, IGNORED),
            },
            lengths=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.long),
            prompts=prompts,
            references=[record["output"] for record in records],
        )

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        with input_ends(batch["labels"]):
            return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits

    def sample_losses(self, logits: Tensor, batch: Batch, reduction: Reduction = "mean") -> Tensor:
        losses, rows = token_losses(logits, batch["labels"])
        sums = losses.new_zeros(len(logits)).index_add(0, rows, losses)
        if reduction == "sum":
            return sums
        return sums / torch.bincount(rows, minlength=len(logits))

    def draw_labels(self, logits: Tensor, batch: Batch, generator: torch.Generator) -> Batch:
        """Every answer token drawn on its own, after the true tokens before it."""
        labels = batch["labels"].clone()
        learnt = labels[:, 1:] != IGNORED
        labels[:, 1:][learnt] = draw(logits.detach()[:, :-1][learnt], generator)
        return {**batch, "labels": labels}

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return token_losses(logits, batch["labels"])[0].mean()

    def evaluate(
        self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str
    ) -> dict[str, float]:
        """Over all answer tokens (end of sequence included): `token_accuracy` and `loss`, the mean per token.

        With `generate`, also per example: `exact_match` (equal after NFKC, case folding and stripping) and `rougeL`
        (F-measure, no stemmer; the scorer sees only a-z and 0-9, so it is of no use for other scripts).
        """
        tokens, correct, loss = 0, 0, 0.0
        with inference(model):
            for batch in batches(examples, batch_size, device):
                logits = self.logits(model, batch)
                losses, _ = token_losses(logits, batch["labels"])
                target = batch["labels"][:, 1:]
                correct += int((logits[:, :-1].argmax(dim=-1) == target).sum())  # IGNORED equals no token
                loss += float(losses.double().sum())
                tokens += len(losses)
        metrics = {"token_accuracy": correct / tokens, "loss": loss / tokens}
        if not self.generate:
            return metrics
        if not isinstance(examples, PaddedExamples):
            raise DataError("generation needs examples that this task prepared, with their prompts")
        answers = self._answers(model, examples.prompts, batch_size, device)
        return metrics | compare(answers, examples.references)

    def predict(
        self, model: nn.Module, inputs: Sequence[Any], batch_size: int = 32, device: torch.device | str | None = None
    ) -> list[dict[str, Any]]:
        """`{"text": answer}` per input, decoded greedily. A string is an instruction without an input."""
        records = [{"instruction": value} if isinstance(value, str) else value for value in inputs]
        prompts = [self.prompt_tokens(record, record_name(record, row)) for row, record in enumerate(records)]
        answers = self._answers(model, prompts, batch_size, device or model_device(model))
        return [{"text": answer} for answer in answers]

    def prompt_tokens(self, record: Record, where: str = "the record") -> list[int]:
        """The tokens that the answer follows, with the beginning-of-sequence token where the model has one."""
        instruction, extra = record.get("instruction"), record.get("input", "")
        if not isinstance(instruction, str) or not instruction:
            raise DataError(f"{where}: instruction must be a non-empty string, got {instruction!r}")
        if not isinstance(extra, str):
            raise DataError(f"{where}: input must be a string, got {extra!r}")
        if self.tokenizer.chat_template:
            turn = {"role": "user", "content": f"{instruction}\n\n{extra}" if extra else instruction}
            text = self.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
            return self._tokens(text)
        # Only what a tokenizer puts in front belongs here: some also append an end token, which would end the prompt.
        start = self.tokenizer("")["input_ids"][:1]
        start = start if start == [self.tokenizer.bos_token_id] else []
        return start + self._tokens(plain_prompt(instruction, extra))

    def _answer_tokens(self, record: Record, where: str) -> list[int]:
        if not isinstance(record.get("output"), str):
            raise DataError(f"{where}: output must be a string, got {record.get('output')!r}")
        return [*self._tokens(record["output"]), self.tokenizer.eos_token_id]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _answers(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], batch_size: int, device: torch.device | str
    ) -> list[str]:
        stop, limit = stop_tokens(model, self.tokenizer), self.tokenizer.model_max_length
        for row, prompt in enumerate(prompts):
            if len(prompt) >= limit:
                raise DataError(f"prompt {row} has {len(prompt)} tokens; the model takes {limit} with the answer")
        answers: list[str] = []
        with inference(model):
            for start in range(0, len(prompts), batch_size):
                batch = prompts[start : start + batch_size]
                tokens = greedy(model, batch, stop, self.tokenizer.pad_token_id, self.max_new_tokens, limit, device)
                answers += self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return answers


def plain_prompt(instruction: str, extra: str = "") -> str:
    """The prompt of a model without a chat template.

    >>> plain_prompt("Translate to French.", "good day")
    '### Instruction:\\nTranslate to French.\\n\\n### Input:\\ngood day\\n\\n### Response:\\n'
    """
    middle = f"### Input:\n{extra}\n\n" if extra else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every learnt token, and the sample it belongs to: (answer tokens,) float32 and int64.

    logits  (batch, tokens, vocabulary); the logits at position t predict the label at t + 1
    labels  (batch, tokens), -100 where nothing is learnt
    """
    target = labels[:, 1:]
    learnt = target != IGNORED
    # Selected before the cast: float32 logits of whole prompts would double the memory of a large vocabulary.
    losses = F.cross_entropy(logits[:, :-1][learnt].float(), target[learnt], reduction="none")
    return losses, learnt.nonzero()[:, 0]
