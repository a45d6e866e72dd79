"""Questions about images: a conversation with any number of images, whose answers a model learns to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from befit.core.errors import DataError, ModelError
from befit.core.values import IGNORED
from befit.tasks.base import Batch, Examples, Record, model_device, record_name
from befit.tasks.causal_lm import CausalLM
from befit.tasks.examples import Options, PaddedExamples, pad_right
from befit.tasks.images import WHOLE
from befit.tasks.text_metrics import GENERATED
from befit.tasks.vqa_examples import Images, VqaExamples, VqaProcessor, VqaPrompt, pixel_values
from befit.tasks.vqa_metrics import SCORE, VQA_METRICS, Answered, answered_of, vqa_metrics
from befit.tasks.vqa_prompts import MARK, as_record, checked_turns, dialogue, images_of, judging

TokenisedRecord = tuple[list[int], list[int], int]  # tokens, labels, and how many tokens stand before the first answer


class VQA(CausalLM):
    """Records hold `images` (see `befit.tasks.images.read_image` for what each may be) and `conversation`, a list of
    {role, content} in which user and assistant alternate; a user's text has the mark `<image>` where an image stands.
    Perhaps `form` ("choice" or "open"), `choices`, `metric` (how open questions are scored), `references`, `task`.

    All answers are learnt, each with the token by which the chat template ends it, else the end-of-sequence token, and
    nothing else. In evaluation the first question is
    answered greedily, and the answer scored: a choice by which of the choices it names, an open one by exact match or
    the record's metric. Images are padded to a square in the model's mean colour, and read when a batch needs them.

    Settings are those of `CausalLM`; `metrics` may also name `vqa_score`, the headline by default, and
    `token_f1_pooled` (see `befit.tasks.vqa_metrics.vqa_metrics`). `model.prompt` renders one question at a time.
    """

    name: ClassVar[str] = "vqa"

    def __init__(
        self,
        processor: VqaProcessor,
        max_length: int = 256,
        *,
        max_new_tokens: int = 128,
        metrics: Sequence[str] = (),
        prompt: str = "auto",
    ) -> None:
        metrics = tuple(metrics) or (SCORE, "exact_match")
        if prompt == "chat-bos":
            raise ModelError("model.prompt: chat-bos is for texts alone; conversations with images begin once")
        super().__init__(processor.tokenizer, max_length, max_new_tokens=max_new_tokens, metrics=metrics, prompt=prompt)
        self.generated = tuple(name for name in metrics if name in (*GENERATED, *VQA_METRICS))
        self.processor = processor
        self.preprocessor = replace(processor.images, square=True)
        token = str(self.tokenizer.convert_ids_to_tokens(processor.image_token))
        self._image_text, before, after = processor.frame or (token, "", "")
        self._places_text = f"{before}{token * processor.tokens_per_image}{after}"

    def prepare(self, records: Sequence[Record]) -> VqaExamples:
        dialogues = self.read(records)
        images = [self._images(record, record_name(record, row)) for row, record in enumerate(records)]
        whole = sum(len(of_record.stored) for of_record in images) <= WHOLE
        for of_record in images:
            of_record.check(whole)
        prompts = self._prompts(records, dialogues, images)
        judged = [judging(record, record_name(record, row)) for row, record in enumerate(records)]
        examples = self._examples([dialogue[:2] for dialogue in dialogues], images)
        return VqaExamples(
            examples.sequences,
            examples.lengths,
            prompts=prompts,  # pyright: ignore[reportArgumentType]
            references=[judgement["references"] for judgement in judged],
            options=self._choosing(records, prompts),
            images=images,
            records=judged,
        )

    def check(self, records: Sequence[Record]) -> None:
        self.read(records)

    def read(self, records: Sequence[Record]) -> list[TokenisedRecord]:
        """Tokens and labels of every record, and how many tokens its first question has. Opens no image.

        Raises DataError that names the first record that cannot be used.
        """
        dialogues = []
        cut = 0
        for row, record in enumerate(records):
            where = record_name(record, row)
            tokens, labels, first = self._tell(record, where)
            if first is None:
                raise DataError(f"{where}: its conversation has no answer to learn or to compare with")
            if first >= self.max_length:
                raise DataError(
                    f"{where}: its first question has {first} tokens with its images, and nothing of the answer is "
                    f"left within {self.max_length}. Raise model.max_length, or give fewer images"
                )
            if self.processor.image_token in tokens[self.max_length :]:
                raise DataError(
                    f"{where}: {len(tokens)} tokens with its images are more than {self.max_length}, and an image "
                    "cannot be cut. Raise model.max_length, or shorten the conversation"
                )
            judging(record, where)
            cut += len(tokens) > self.max_length
            dialogues.append((tokens[: self.max_length], labels[: self.max_length], first))
        self._tell_of_cuts(cut, len(records))
        return dialogues

    def _images(self, record: Record, where: str) -> Images:
        return Images(images_of(record, where), self.preprocessor, where)

    def part(self, batch: Batch, places: Tensor) -> Batch:
        """With the images of these samples, which stand one after the other in a batch."""
        texts = {name: values for name, values in batch.items() if name != "pixel_values"}
        images = torch.arange(len(batch.get("pixel_values", ())))
        counts = (batch["input_ids"] == self.processor.image_token).sum(1) // self.processor.tokens_per_image
        of_each = images.split(counts.tolist())
        seen = torch.cat([of_each[place] for place in places.tolist()])
        of_texts = super().part(texts, places)
        return {**of_texts, "pixel_values": batch["pixel_values"][seen]} if len(seen) else of_texts

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.forward(model, batch, **self._images_for(model, batch))

    def compared(self, answers: Sequence[str], examples: Examples, rows: Sequence[int]) -> dict[str, float]:
        return vqa_metrics(self._answered(answers, examples, rows), self.generated)

    def _scored_answers(
        self, answers: Sequence[str], examples: Examples, values: Sequence[str] = ()
    ) -> dict[str, float]:
        scores = super()._scored_answers(answers, examples, values)
        if self.metric in self.generated and self.metric not in scores:
            kind = "choices" if self.metric == "choice_parse" else "open answers"
            raise DataError(f"evaluate.metrics begins with {self.metric}, and no question here has {kind}")
        return scores

    def _answered(self, answers: Sequence[str], examples: Examples, rows: Sequence[int]) -> list[Answered]:
        assert isinstance(examples, VqaExamples) and len(answers) == len(examples.records)
        return [answered_of(examples.records[row], answers[row], self._tokens) for row in rows]

    def predict(
        self, model: nn.Module, inputs: Sequence[Any], batch_size: int = 32, device: torch.device | str | None = None
    ) -> list[dict[str, Any]]:
        """`{"answer": text}` per input, decoded greedily; the answer to the last question of a conversation.

        An input is a question without images, {images, question}, where the images stand before the question unless it
        has marks for them, or {images, conversation} whose last turn may be the question or an answer to leave out.
        """
        prompts = []
        for row, value in enumerate(inputs):
            record = as_record(value)
            where = record_name(record, row)
            turns = record.get("conversation")
            if isinstance(turns, Sequence) and len(turns) % 2 == 0 and len(turns):
                record = {**record, "conversation": turns[:-1]}
            tokens, _, _ = self._tell(record, where)
            prompts.append(VqaPrompt(tokens, self._images(record, where)))
        answers = self._answers(model, prompts, batch_size, device or model_device(model))
        return [{"answer": answer} for answer in answers]

    def _tell(self, record: Record, where: str) -> tuple[list[int], list[int], int | None]:
        """Tokens and labels of a whole conversation, and how many tokens stand before the first answer."""
        turns = checked_turns(record.get("conversation"), len(images_of(record, where)), where)
        tokens: list[int] = []
        labels: list[int] = []
        first: int | None = None
        parts = dialogue(turns, self.prompt, self.tokenizer, self._image_text, where)
        for number, (before, answer, end) in enumerate(parts):
            question = self._asked(before, where, start=number == 0)
            tokens += question
            labels += [IGNORED] * len(question)
            if answer is not None:
                first = len(tokens) if first is None else first
                learnt = self._tokens(answer, where) + self._ended(end, where, last=number == len(parts) - 1)
                tokens += learnt
                labels += learnt
        images = len(images_of(record, where))
        if tokens.count(self.processor.image_token) != images * self.processor.tokens_per_image:
            raise DataError(
                f"{where}: its prompt does not have a {self._image_text} for each of its {images} images: "
                "see model.prompt and the chat template"
            )
        return tokens, labels, first

    def _ended(self, end: str, where: str, last: bool) -> list[int]:
        """The tokens that end an answer: the chat template's, without blanks before them, and the end-of-sequence token
        where the conversation ends or the template has no token for the end of an answer."""
        tokens = self._tokens(end.lstrip(), where)
        known = self.tokenizer.added_tokens_decoder
        ended = any(token in known and known[token].special for token in tokens) and not last
        return tokens if ended or self.tokenizer.eos_token_id in tokens else [*tokens, self.tokenizer.eos_token_id]

    def _asked(self, text: str, where: str, start: bool) -> list[int]:
        """The tokens of a question, every image's in full, with the beginning-of-sequence token where the model has one
        and the text begins."""
        tokens = self._tokens(text.replace(self._image_text, self._places_text), where)
        if start and self._begin != tokens[:1]:
            tokens = [*self._begin, *tokens]
        return tokens

    def _prompts(
        self, records: Sequence[Record], dialogues: Sequence[TokenisedRecord], images: Sequence[Images]
    ) -> list[VqaPrompt]:
        """What stands before the first answer, with the images of the first question."""
        firsts = [record["conversation"][0]["content"].count(MARK) for record in records]
        return [
            VqaPrompt(tokens[:first], replace(of_record, stored=of_record.stored[:count]))
            for (tokens, _, first), of_record, count in zip(dialogues, images, firsts, strict=True)
        ]

    def _examples(self, dialogues: Sequence[tuple[list[int], list[int]]], images: Sequence[Images]) -> VqaExamples:
        sequences = {
            "input_ids": pad_right([tokens for tokens, _ in dialogues], self.tokenizer.pad_token_id),
            "labels": pad_right([labels for _, labels in dialogues], IGNORED),
        }
        lengths = torch.tensor([len(tokens) for tokens, _ in dialogues], dtype=torch.long)
        return VqaExamples(sequences, lengths, images=images)

    def _choosing(self, records: Sequence[Record], prompts: Sequence[VqaPrompt]) -> Options | None:
        """The answers to choose from, where a metric is of their likelihood."""
        if not self.likelihoods:
            return None
        plain = [{**record, "output": record["conversation"][1]["content"]} for record in records]
        options = self._options(plain, [prompt.tokens for prompt in prompts])
        assert options is not None
        images = [prompt.images for prompt, texts in zip(prompts, options.texts, strict=True) for _ in texts]
        examples = options.examples
        return Options(VqaExamples(examples.sequences, examples.lengths, images=images), options.texts, options.right)

    def _wholes(self, examples: PaddedExamples, rows: Sequence[int]) -> list[VqaPrompt]:
        assert isinstance(examples, VqaExamples)
        tokens = super()._wholes(examples, rows)
        return [VqaPrompt(whole, examples.images[row]) for whole, row in zip(tokens, rows, strict=True)]

    def _read(self, prompt: VqaPrompt) -> Sequence[int]:
        return prompt.tokens

    def _skipped(self, prompt: VqaPrompt) -> int:
        return len(prompt.images.stored) * self.processor.skipped

    def _seen(self, model: nn.Module, prompts: Sequence[VqaPrompt], device: torch.device | str) -> dict[str, Tensor]:
        images = pixel_values([prompt.images for prompt in prompts])
        return self._images_for(model, {name: pixels.to(device) for name, pixels in images.items()})

    def _images_for(self, model: nn.Module, batch: Batch) -> Batch:
        """The images of a batch as the model takes them, where there are any."""
        dtype: Any = model.dtype
        if "pixel_values" not in batch:
            return {}
        pixels = batch["pixel_values"].to(dtype)
        return {"pixel_values": pixels.unsqueeze(1) if self.processor.tiled else pixels}
