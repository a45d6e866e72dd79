"""Direct preference optimisation of a causal language model: of two answers to a prompt one was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.core.errors import DataError, ModelError
from befit.core.schema import show
from befit.core.values import IGNORED
from befit.tasks.base import Batch, Examples, Record, Reduction, by_value, record_name, scored
from befit.tasks.causal_lm import CausalLM, last_answers, per_sample, samples_of, token_losses
from befit.tasks.examples import PaddedExamples
from befit.tasks.preference_records import SIDES

ACCURACY, MARGIN = "preference_accuracy", "reward_margin"
REFERENCE, SWAPPED = "reference", "swapped"  # in a batch, beside the texts


@dataclass(frozen=True)
class Pairs(PaddedExamples):
    """Two texts of each example; what `PaddedExamples` has is of the chosen one, for generation.

    texts      every example's prompt with the chosen answer, and in the next row with the rejected one
    reference  (examples,) float32, log p(chosen) - log p(rejected) of the bare backbone; None until it is computed
    """

    texts: PaddedExamples | None = None
    reference: Tensor | None = None

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        """Two rows of each example, one after the other."""
        assert self.texts is not None
        places = torch.as_tensor(indices, dtype=torch.long)
        batch = self.texts.batch((2 * places[:, None] + torch.arange(2)).flatten())
        return batch if self.reference is None else {**batch, REFERENCE: self.reference[places]}


class Preference(CausalLM):
    """Records are those of `CausalLM` (`instruction` and perhaps `input`, `prompt`, or `messages`) with the texts
    `chosen` and `rejected` in place of `output`.

    The loss of a pair is `-log sigmoid(beta h)`, `h = log p(w | x) / p_ref(w | x) - log p(l | x) / p_ref(l | x)`, with
    the chosen answer w, the rejected l, and the bare backbone as the reference p_ref (Rafailov et al. 2023, eq. 7).
    What the backbone makes of an example is computed once (`refer`), so that a step has no third forward pass.

    Measured are `preference_accuracy`, the share of pairs with h > 0 (of those with h = 0 half, so that a model without
    adapters has one half), `reward_margin`, the mean of beta h, and `loss`; with `generate` or metrics of generated
    answers these too, of which the chosen answer is the expected one.

    dpo_beta  how near the model is held to the reference
    """

    name: ClassVar[str] = "preference"
    rows_each: ClassVar[int] = 2

    def __init__(
        self,
        tokenizer: Any,
        max_length: int = 256,
        *,
        generate: bool = False,
        max_new_tokens: int = 128,
        metrics: Sequence[str] = (),
        prompt: str = "auto",
        long_prompts: Literal["refuse", "drop"] = "refuse",
        dpo_beta: float = 0.1,
    ) -> None:
        super().__init__(
            tokenizer,
            max_length,
            max_new_tokens=max_new_tokens,
            metrics=tuple(metrics) or (ACCURACY, *(("exact_match", "rougeL") if generate else ())),
            prompt=prompt,
            long_prompts=long_prompts,
        )
        self.beta = dpo_beta

    def prepare(self, records: Sequence[Record]) -> Pairs:
        answers: list[Any] = []
        for side in SIDES:
            answered = [_answered(record, side, record_name(record, row)) for row, record in enumerate(records)]
            answers.append(last_answers(super().prepare(answered)))
        for row, record in enumerate(records):
            if record["chosen"] == record["rejected"]:
                raise DataError(
                    f"{record_name(record, row)}: chosen and rejected are the same, {show(record['chosen'])}"
                )
        chosen, rejected = answers
        width = max(answer.sequences["labels"].shape[1] for answer in answers)
        fill = {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORED}
        rows = {
            key: torch.stack([_wide(answer.sequences[key], width, fill[key]) for answer in answers], 1).flatten(0, 1)
            for key in fill
        }
        lengths = torch.stack([chosen.lengths, rejected.lengths], 1).flatten()
        return Pairs(
            chosen.sequences,
            chosen.lengths,
            prompts=chosen.prompts,
            references=chosen.references,
            texts=PaddedExamples(rows, lengths),
        )

    def refer(self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str) -> Examples:
        if not len(examples):
            return examples
        assert isinstance(examples, Pairs)
        (ratios,) = scored(
            model, examples, batch_size, device, lambda batch: (_log_ratio(self.logits(model, batch), batch),)
        )
        return replace(examples, reference=ratios)

    def terms(self, batch: Batch) -> Tensor:
        return torch.ones(len(batch["labels"]) // 2, device=batch["labels"].device)

    def positions(self, batch: Batch) -> Tensor:
        """Of both answers of each pair."""
        return super().terms(batch).view(-1, 2).sum(1)

    def sample_losses(self, logits: Tensor, batch: Batch, reduction: Reduction = "mean") -> Tensor:
        """(pairs,): a pair has one loss, whatever the reduction."""
        return F.softplus(-self._margins(logits, batch) * (1 - 2 * batch[SWAPPED] if SWAPPED in batch else 1))

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.sample_losses(logits, batch).mean()

    def judged(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits, samples_of(batch) // 2

    def draw_labels(self, logits: Tensor, batch: Batch, generator: torch.Generator) -> Batch:
        """Which answer of each pair is the chosen one, by the probability sigmoid(beta h) that the loss is of."""
        margins = self._margins(logits.detach(), batch)
        uniform = torch.rand(len(margins), generator=generator, dtype=torch.float64).to(margins.device)
        return {**batch, SWAPPED: (uniform >= margins.double().sigmoid()).float()}

    def evaluate(
        self,
        model: nn.Module,
        examples: Examples,
        batch_size: int,
        device: torch.device | str,
        values: Sequence[str] = (),
    ) -> dict[str, float]:
        (margins,) = scored(
            model,
            examples,
            batch_size,
            device,
            lambda batch: (self._margins(self.logits(model, batch), batch).double(),),
        )
        right = (margins.sign() + 1) / 2
        metrics = {
            ACCURACY: float(right.mean()),
            MARGIN: float(margins.mean()),
            "loss": float(F.softplus(-margins).mean()),
        }
        metrics |= by_value(values, lambda rows: {ACCURACY: float(right[rows].mean())})
        if self.generated:
            assert isinstance(examples, Pairs)
            metrics |= self._scored_answers(self._all_answers(model, examples, batch_size, device), examples, values)
        return {self.metric: metrics[self.metric], **metrics}

    def _margins(self, logits: Tensor, batch: Batch) -> Tensor:
        """(pairs,) beta h."""
        if REFERENCE not in batch:
            raise ModelError("these examples lack what the bare backbone makes of them; give them to the task's refer")
        return self.beta * (_log_ratio(logits, batch) - batch[REFERENCE])


def _log_ratio(logits: Tensor, batch: Batch) -> Tensor:
    """(pairs,) float32: log p(chosen) - log p(rejected)."""
    losses = per_sample(token_losses(logits, batch), batch)
    return losses[1::2] - losses[::2]


def _answered(record: Record, side: str, where: str) -> Record:
    """A record of a language model with one of the answers."""
    answer = record.get(side)
    if not isinstance(answer, str):
        raise DataError(f"{where}: {side} must be a string, got {answer!r}")
    if "messages" not in record:
        return {**record, "output": answer}
    return {**record, "messages": [*record["messages"], {"role": "assistant", "content": answer}], "output": answer}


def _wide(tokens: Tensor, width: int, value: int) -> Tensor:
    return F.pad(tokens, (0, width - tokens.shape[1]), value=value)
