"""Supervised fine-tuning of a causal language model: an instruction, perhaps an input, and the answer to learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.instance import input_ends
from befit.core.errors import DataError, ModelError
from befit.core.values import IGNORED
from befit.tasks.answers import ANSWERS, answer_logits, answer_places, is_causal
from befit.tasks.base import (
    Batch,
    Examples,
    Record,
    Reduction,
    Task,
    batches,
    by_value,
    draw,
    inference,
    model_device,
    record_name,
    to_device,
)
from befit.tasks.choices import choice_metrics
from befit.tasks.examples import Options, PaddedExamples, pad_right
from befit.tasks.generation import Following, Judge, greedy, stop_tokens
from befit.tasks.prompts import CHATS, TEMPLATES, chat_text, conversation_runs, render
from befit.tasks.text_metrics import GENERATED, LIKELIHOOD, compare
from befit.tasks.unasked import unasked

_LOG = logging.getLogger(__name__)


class CausalLM(Task):
    """Records hold `instruction`, perhaps `input`, and `output`; perhaps `references`, all the answers that count as
    right (the output alone otherwise), `choices`, the answers to choose from, one of which is the output, and
    `choice_names`, how a generated answer may name each of these in fewer words.

    Or they have one of the forms of TRL: `messages`, of which each of the assistant's is learnt, as the tokenizer's
    chat template writes them (`befit.tasks.prompts.conversation_runs`); `prompt` and `output`, as they stand; or
    `text`, all of which is learnt. Measured is the last answer, after all that stands before it.

    The answer and the end-of-sequence token follow the prompt; only they are learnt. Prompt and answer are tokenised
    apart, so that training and generation see the same prompt tokens. Longer sequences lose their end: the first
    `prepare` that cuts any says so in the log, `truncated` counts them.

    generate        also answer each prompt greedily in `evaluate` (many forward passes per example)
    max_new_tokens  the longest answer that is generated
    metrics         what `evaluate` measures beside token accuracy, the headline first, by the names of
                    `befit.tasks.text_metrics.METRICS`; empty: exact_match and rougeL with `generate`
    long_prompts    of a record whose prompt alone has max_length tokens: "refuse" raises; "drop" does not train on it
                    (`trains_on`), and reads it whole where it is measured, up to the model's own limit. A prompt that
                    is longer even than that has the empty answer
    prompt          "chat": one user turn of the tokenizer's chat template (instruction, blank line, input);
                    "chat-bos": the same after one more beginning-of-sequence token; "plain" or "alpaca"; "auto": chat
                    where the tokenizer has a template, else plain; or a template of one's own with {instruction} and
                    {input}
    """

    name: ClassVar[str] = "causal-lm"

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
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        metrics = tuple(metrics) or (("exact_match", "rougeL") if generate else ("token_accuracy",))
        self.metric = metrics[0]
        self.generated = tuple(name for name in metrics if name in GENERATED)
        self.likelihoods = tuple(name for name in metrics if name in LIKELIHOOD)
        self.max_new_tokens = max_new_tokens
        if prompt in CHATS and not tokenizer.chat_template:
            raise ModelError(
                f"model.prompt is {prompt}, and the tokenizer of this model has no chat template; use "
                "auto, plain, alpaca or a template of your own"
            )
        if prompt == "chat-bos" and tokenizer.bos_token_id is None:
            raise ModelError(
                "model.prompt is chat-bos, and the tokenizer of this model has no beginning-of-sequence token; use chat"
            )
        self.prompt = ("chat" if tokenizer.chat_template else "plain") if prompt == "auto" else prompt
        self.long_prompts = long_prompts
        self.truncated = self.unreadable = 0

    def trains_on(self, record: Record, where: str) -> bool:
        return self.long_prompts == "refuse" or len(self.prompt_tokens(record, where)) < self.max_length

    def prepare(self, records: Sequence[Record]) -> PaddedExamples:
        prompts, sequences, labels, cut = list[list[int]](), list[list[int]](), list[list[int]](), 0
        limit = self.tokenizer.model_max_length
        for position, record in enumerate(records):
            where = record_name(record, position)
            prompt, answer, earlier = self._prompt_and_answer(record, where)
            prompts.append(prompt)
            longest = self.max_length
            if len(prompt) >= self.max_length:
                if self.long_prompts == "refuse":
                    raise DataError(
                        f"{where}: its prompt has {len(prompt)} tokens, and nothing of its answer is left within "
                        f"{self.max_length}. Raise model.max_length, shorten the record, or leave such records out of "
                        "training with model.long_prompts: drop"
                    )
                longest = limit
            cut += len(prompt) < self.max_length < len(prompt) + len(answer)
            sequences.append([*prompt, *answer][:longest])
            labels.append([*earlier, *answer][:longest])
        self._tell_of_cuts(cut, len(records))
        self._tell_of_unreadable(sum(len(prompt) >= limit for prompt in prompts), len(records))
        return PaddedExamples(
            sequences={
                "input_ids": pad_right(sequences, self.tokenizer.pad_token_id),
                "labels": pad_right(labels, IGNORED),
            },
            lengths=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.long),
            prompts=prompts,
            references=[_references(record, record_name(record, row)) for row, record in enumerate(records)],
            options=self._options(records, prompts),
        )

    def _tell_of_cuts(self, cut: int, records: int) -> None:
        if cut and not self.truncated:
            _LOG.warning(
                "%d of %d answers were cut at %d tokens (said once); raise model.max_length to keep them whole",
                cut,
                records,
                self.max_length,
            )
        self.truncated += cut

    def _tell_of_unreadable(self, count: int, records: int) -> None:
        if count and not self.unreadable:
            _LOG.warning(
                "%d of %d prompts fill the %d tokens that the model takes (said once); their answers count as empty",
                count,
                records,
                self.tokenizer.model_max_length,
            )
        self.unreadable += count

    def terms(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum(1).float()

    @property
    def padding(self) -> Mapping[str, int] | None:
        return {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0, "labels": IGNORED}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(answer tokens, vocabulary): of the tokens that the loss is of, row after row."""
        return self.forward(model, batch)

    def forward(self, model: nn.Module, batch: Batch, **seen: Tensor) -> Tensor:
        """`logits`, of a model that sees something beside the text. A batch without labels has none, and is read with
        its mask: whoever asks for that looks at the model's states, perhaps at those of the padding."""
        # Padding is on the right, so no answer can look at it, and attention is faster without a mask.
        mask = None if "labels" in batch and is_causal(model) else batch["attention_mask"]
        tokens = batch["input_ids"]
        with input_ends(batch["labels"]) if "labels" in batch else nullcontext(), unasked(tokens.device):
            return answer_logits(
                model, places_of(batch), input_ids=tokens, attention_mask=mask, use_cache=False, **seen
            )

    def sample_losses(self, logits: Tensor, batch: Batch, reduction: Reduction = "mean") -> Tensor:
        sums = per_sample(token_losses(logits, batch), batch)
        if reduction == "sum":
            return sums
        # A prompt that fills the model's positions leaves no answer token to have a loss.
        return sums / (batch["labels"][:, 1:] != IGNORED).sum(1).clamp_min(1)

    def judged(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits, samples_of(batch)

    def draw_labels(self, logits: Tensor, batch: Batch, generator: torch.Generator) -> Batch:
        """Every answer token drawn on its own, after the true tokens before it."""
        labels = batch["labels"].flatten().index_copy(0, places_of(batch) + 1, draw(logits.detach(), generator))
        return {**batch, "labels": labels.view_as(batch["labels"])}

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        # The mean, also where there are more places than answer tokens, see `befit.train.replay.rounded`.
        return token_losses(logits, batch).sum() / (targets(batch) != IGNORED).sum()

    def evaluate(
        self,
        model: nn.Module,
        examples: Examples,
        batch_size: int,
        device: torch.device | str,
        values: Sequence[str] = (),
    ) -> dict[str, float]:
        """Over all answer tokens (end of sequence included): `token_accuracy` and `loss`, the mean per token.

        With `metrics` those too, per example: of generated answers (`befit.tasks.text_metrics.compare`), and of the
        likelihood of the answers to choose from (`befit.tasks.choices.choice_metrics`).
        """
        examples = last_answers(examples)
        judged, answers = _Judged(len(examples)), list[str]()
        if self.generated and len(examples):
            answers = self._all_answers(model, _prompted(examples), batch_size, device, judged)
        else:
            with inference(model):
                for places, batch in batches(examples, batch_size, device):
                    judged.add(places, self.logits(model, batch), batch)
        if not (total := int(judged.tokens.sum())):
            raise DataError(
                f"the prompts of all {len(examples)} examples fill the {self.tokenizer.model_max_length} "
                "tokens that the model takes, so there is no answer to measure"
            )
        metrics = {"token_accuracy": int(judged.right.sum()) / total, "loss": float(judged.losses.sum()) / total}

        def of_tokens(rows: list[int]) -> dict[str, float]:
            count = int(judged.tokens[rows].sum())
            return {"token_accuracy": int(judged.right[rows].sum()) / count} if count else {}

        metrics |= by_value(values, of_tokens)
        if not self.generated and not self.likelihoods:
            return metrics
        options = _prompted(examples).options
        if options is not None and self.likelihoods:
            metrics |= choice_metrics(self, model, options, self.likelihoods, batch_size, device, values)
        if self.generated:
            metrics |= self._scored_answers(answers, examples, values)
        return {self.metric: metrics[self.metric], **metrics}  # the headline first: progress shows the first

    def headline(self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str) -> float:
        """Of generated answers without the loss, for which the model would read the expected answers too."""
        if self.metric not in self.generated:
            return super().headline(model, examples, batch_size, device)
        answers = self._all_answers(model, _prompted(examples), batch_size, device)
        return self._scored_answers(answers, examples)[self.metric]

    def _scored_answers(
        self, answers: Sequence[str], examples: Examples, values: Sequence[str] = ()
    ) -> dict[str, float]:
        prompted = _prompted(examples)
        metrics = self.compared(answers, prompted, range(len(answers)))
        return metrics | by_value(values, lambda rows: self.compared(answers, prompted, rows))

    def _all_answers(
        self,
        model: nn.Module,
        examples: PaddedExamples,
        batch_size: int,
        device: torch.device | str,
        judged: _Judged | None = None,
    ) -> list[str]:
        """One answer for every prompt: the empty one where a prompt that is not refused is too long to be read.

        judged  gets what the model makes of the expected answers, in the same passes
        """
        prompts, limit = examples.prompts, self.tokenizer.model_max_length
        everything = self.long_prompts == "refuse"
        readable = [row for row, prompt in enumerate(prompts) if everything or len(prompt) < limit]
        labels = examples.sequences["labels"]

        def judge(places: list[int], logits: Tensor) -> None:
            rows = [readable[place] for place in places]
            wanted = [labels[row, len(prompts[row]) - 1 :][: logits.shape[1]].tolist() for row in rows]
            assert judged is not None
            batch = to_device({"labels": pad_right(wanted, IGNORED).long()}, logits.device)
            judged.add(torch.tensor(rows), logits.flatten(0, 1).index_select(0, places_of(batch)), batch)

        texts = self._answers(
            model,
            [prompts[row] for row in readable],
            batch_size,
            device,
            None if judged is None else self._wholes(examples, readable),
            judge,
        )
        answers = [""] * len(prompts)
        for row, answer in zip(readable, texts, strict=True):
            answers[row] = answer
        return answers

    def compared(self, answers: Sequence[str], examples: PaddedExamples, rows: Sequence[int]) -> dict[str, float]:
        """The metrics of the generated answers to the examples at `rows`; of all examples there is one answer."""
        options = examples.options
        texts, names = (options.texts, options.names or options.texts) if options is not None else ((), ())
        return compare(
            [answers[row] for row in rows],
            [examples.references[row] for row in rows],
            self.generated,
            [texts[row] for row in rows] if texts else (),
            [names[row] for row in rows] if names else (),
        )

    def predict(
        self, model: nn.Module, inputs: Sequence[Any], batch_size: int = 32, device: torch.device | str | None = None
    ) -> list[dict[str, Any]]:
        """`{"answer": text}` per input, decoded greedily. A string is an instruction without an input."""
        records = [{"instruction": value} if isinstance(value, str) else value for value in inputs]
        prompts = [self.prompt_tokens(record, record_name(record, row)) for row, record in enumerate(records)]
        answers = self._answers(model, prompts, batch_size, device or model_device(model))
        return [{"answer": answer} for answer in answers]

    def prompt_tokens(self, record: Record, where: str = "the record") -> list[int]:
        """The tokens that the answer follows, with the beginning-of-sequence token where the model has one.

        Of a text that is learnt as a whole, which has no prompt, the first one: nothing stands before it.
        """
        if "messages" in record:
            return self._conversation(record["messages"], where)[0]
        if "prompt" in record:
            return self._begun(record["prompt"], where)
        if "text" in record:
            if self.generated:
                raise DataError(
                    f"{where} has a text and nothing that is asked, so that no answer can be measured: leave "
                    "evaluate.generate and metrics of generated answers out, or give prompt and completion"
                )
            return self._begun(record["text"], where)[:1]
        instruction, extra = record.get("instruction"), record.get("input", "")
        if not isinstance(instruction, str) or not instruction:
            raise DataError(f"{where}: instruction must be a non-empty string, got {instruction!r}")
        if not isinstance(extra, str):
            raise DataError(f"{where}: input must be a string, got {extra!r}")
        if self.prompt in CHATS:
            turn = {"role": "user", "content": f"{instruction}\n\n{extra}" if extra else instruction}
            text = chat_text(self.tokenizer, [turn])
            once_more = [self.tokenizer.bos_token_id] if self.prompt == "chat-bos" else []
            return once_more + self._tokens(text, where)
        if extra and self.prompt not in TEMPLATES and "{input}" not in self.prompt:
            raise DataError(f"{where} has an input, for which model.prompt has no place: write {{input}} into it")
        return self._begun(render(self.prompt, instruction, extra), where)

    def _begun(self, text: str, where: str) -> list[int]:
        """The tokens of a text, after the beginning-of-sequence token where the model has one."""
        tokens = self._begin + self._tokens(text, where)
        if not tokens:
            raise DataError(f"{where}: its prompt has no token")
        return tokens

    @cached_property
    def _begin(self) -> list[int]:
        """The beginning-of-sequence token, of a model that has one before its texts."""
        # Only what a tokenizer puts in front belongs here: some also append an end token, which would end the prompt.
        start = self.tokenizer("")["input_ids"][:1]
        return start if start == [self.tokenizer.bos_token_id] else []

    def _prompt_and_answer(self, record: Record, where: str) -> tuple[list[int], list[int], list[int]]:
        """The prompt, the answer that follows it, and what is learnt of the prompt: its labels."""
        if "messages" in record:
            return self._conversation(record["messages"], where)
        prompt = self.prompt_tokens(record, where)
        return prompt, self._answer_tokens(record, where), [IGNORED] * len(prompt)

    def _conversation(
        self, messages: Sequence[Mapping[str, str]], where: str
    ) -> tuple[list[int], list[int], list[int]]:
        """The same of a conversation: each of the assistant's messages is learnt, and the last one is the answer, none
        where the last message is the user's."""
        if self.prompt not in CHATS:
            raise DataError(
                f"{where} has messages, which a chat template puts together: "
                + (
                    f"model.prompt is {self.prompt}, set it to chat"
                    if self.tokenizer.chat_template
                    else "the tokenizer of this model has none; give prompt and completion instead"
                )
            )
        runs = conversation_runs(self.tokenizer, messages, lambda text: self._tokens(text, where), where)
        answer = self._to_its_end(runs.pop()[0])[0] if runs[-1][1] else []
        if answer and self.tokenizer.eos_token_id not in answer:
            answer = [*answer, self.tokenizer.eos_token_id]
        once_more = [self.tokenizer.bos_token_id] if self.prompt == "chat-bos" else []
        prompt, earlier = once_more, [IGNORED] * len(once_more)
        for tokens, learnt in runs:
            said, after = self._to_its_end(tokens) if learnt else ([], tokens)
            prompt, earlier = [*prompt, *tokens], [*earlier, *said, *[IGNORED] * len(after)]
        return prompt, answer, earlier

    def _to_its_end(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """An answer with its end token, and what a template writes after that, such as a new line: nobody generates it,
        and its tokens would be the easiest to be right about."""
        end = tokens.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in tokens else len(tokens)
        return tokens[:end], tokens[end:]

    def _answer_tokens(self, record: Record, where: str) -> list[int]:
        if "text" in record:
            return [*self._begun(record["text"], where)[1:], self.tokenizer.eos_token_id]
        if not isinstance(record.get("output"), str):
            raise DataError(f"{where}: output must be a string, got {record.get('output')!r}")
        return [*self._tokens(record["output"], where), self.tokenizer.eos_token_id]

    def _options(self, records: Sequence[Record], prompts: Sequence[Sequence[int]]) -> Options | None:
        """The answers to choose from, where a metric needs them, and tokens of those that are scored. None is cut."""
        if not self.likelihoods and "choice_parse" not in self.generated:
            return None
        limit = self.max_length if self.long_prompts == "refuse" else self.tokenizer.model_max_length
        texts, names, sequences, labels, right = [], [], [], [], []
        for position, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
            where = record_name(record, position)
            texts.append(_choices(record, where))
            names.append(_names(record, texts[-1], where))
            right.append(texts[-1].index(record["output"]))
            for text in texts[-1] if self.likelihoods else ():
                answer = self._tokens(text, where)
                if not answer or len(prompt) + len(answer) > limit:
                    raise DataError(
                        f"{where}: prompt and choice {text!r} have {len(prompt)} and {len(answer)} tokens; "
                        f"a choice needs one, and both have to fit {limit}"
                    )
                sequences.append([*prompt, *answer])
                labels.append([*[IGNORED] * len(prompt), *answer])
        tokens = {"input_ids": pad_right(sequences, self.tokenizer.pad_token_id), "labels": pad_right(labels, IGNORED)}
        lengths = torch.tensor([len(row) for row in sequences], dtype=torch.long)
        return Options(PaddedExamples(tokens, lengths), texts, right, names)

    def _tokens(self, text: str, where: str = "the text") -> list[int]:
        try:
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # what the tokenizers library raises for a character that a vocabulary lacks
            raise DataError(f"{where}: {text!r} cannot be written in the tokens of this model: {error}") from error

    def _answers(
        self,
        model: nn.Module,
        prompts: Sequence[Any],
        batch_size: int,
        device: torch.device | str,
        wholes: Sequence[Any] | None = None,
        judge: Judge | None = None,
    ) -> list[str]:
        """The answer to every prompt.

        wholes  each prompt with what follows it in the data, which `judge` takes, see `Following`
        """
        stop, limit = stop_tokens(model, self.tokenizer), self.tokenizer.model_max_length
        for row, prompt in enumerate(prompts):
            if len(prompt) >= limit:
                raise DataError(f"prompt {row} has {len(prompt)} tokens; the model takes {limit} with the answer")
        following = None
        if wholes is not None and judge is not None:
            after = [self._read(whole)[len(prompt) :] for whole, prompt in zip(wholes, prompts, strict=True)]
            following = Following(after, judge)

        def seen(places: list[int], whole: bool) -> Mapping[str, Tensor]:
            inputs = wholes if whole and wholes is not None else prompts
            return self._seen(model, [inputs[place] for place in places], device)

        with inference(model):
            tokens = greedy(
                model,
                [self._read(prompt) for prompt in prompts],
                stop,
                self.tokenizer.pad_token_id,
                self.max_new_tokens,
                limit,
                device,
                batch_size=batch_size,
                seen=seen,
                following=following,
                skipped=[self._skipped(prompt) for prompt in prompts],
            )
        return [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in tokens]

    def _skipped(self, prompt: Any) -> int:
        """How many positions fewer than tokens a prompt takes."""
        return 0

    def _wholes(self, examples: PaddedExamples, rows: Sequence[int]) -> Sequence[Any]:
        """The prompts of these examples, each with all that follows it."""
        tokens, lengths = examples.sequences["input_ids"], examples.lengths.tolist()
        return [tokens[row, : lengths[row]].tolist() for row in rows]

    def _read(self, prompt: Any) -> Sequence[int]:
        """The tokens of a prompt."""
        return prompt

    def _seen(self, model: nn.Module, prompts: Sequence[Any], device: torch.device | str) -> Mapping[str, Tensor]:
        """What the model takes of prompts beside their tokens."""
        return {}


class _Judged:
    """What a model makes of the expected answers, of every example: how many tokens there are to judge, how many of
    them it finds the likeliest, and the sum of their losses."""

    def __init__(self, examples: int) -> None:
        self.tokens = torch.zeros(examples, dtype=torch.long)
        self.right = torch.zeros(examples, dtype=torch.long)
        self.losses = torch.zeros(examples, dtype=torch.float64)

    def add(self, places: Tensor, logits: Tensor, batch: Batch) -> None:
        """What is made of the answer tokens, logits (answer tokens, vocabulary), of the examples at `places`."""
        self.tokens[places] = (batch["labels"][:, 1:] != IGNORED).sum(1).cpu()
        self.right[places] = per_sample((logits.argmax(dim=-1) == targets(batch)).long(), batch).cpu()
        self.losses[places] = per_sample(token_losses(logits, batch).double(), batch).cpu()


def last_answers(examples: Examples) -> Examples:
    """Examples with the labels of what follows their prompts alone: of a conversation, those of its last answer."""
    if type(examples) is not PaddedExamples or not examples.prompts:
        return examples
    labels = examples.sequences["labels"]
    starts = torch.tensor([len(prompt) for prompt in examples.prompts])
    last = labels.masked_fill(torch.arange(labels.shape[1]) < starts[:, None], IGNORED)
    return replace(examples, sequences={**examples.sequences, "labels": last})


def _prompted(examples: Examples) -> PaddedExamples:
    if not isinstance(examples, PaddedExamples) or not examples.prompts:
        raise DataError("generation needs examples that this task prepared, with their prompts")
    return examples


def _references(record: Record, where: str) -> tuple[str, ...]:
    """The answers that count as right."""
    references = record.get("references") or (record["output"],)
    if isinstance(references, str) or not all(isinstance(text, str) for text in references):
        raise DataError(f"{where}: references must be a list of strings, got {references!r}")
    return tuple(references)


def _choices(record: Record, where: str) -> tuple[str, ...]:
    """The answers to choose from, checked."""
    choices = record.get("choices")
    if (
        not isinstance(choices, Sequence)
        or isinstance(choices, str)
        or not all(isinstance(text, str) for text in choices)
    ):
        raise DataError(f"{where}: evaluate.metrics asks for choices, which must be a list of strings, got {choices!r}")
    if len({text.strip() for text in choices}) < max(2, len(choices)):
        raise DataError(f"{where}: choices must be at least two different texts, got {list(choices)!r}")
    if record["output"] not in choices:
        raise DataError(f"{where}: its output {record['output']!r} is not among its choices {list(choices)!r}")
    return tuple(choices)


def _names(record: Record, choices: Sequence[str], where: str) -> tuple[str, ...]:
    """How an answer names each choice."""
    names = record.get("choice_names")
    if names is None:
        return tuple(choices)
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(text, str) for text in names):
        raise DataError(f"{where}: choice_names must be a list of strings, got {names!r}")
    if len(names) != len(choices) or len({text.strip() for text in names} - {""}) < len(names):
        raise DataError(
            f"{where}: choice_names must be {len(choices)} different texts, one for each of its choices, "
            f"got {list(names)!r}"
        )
    return tuple(names)


def places_of(batch: Batch) -> Tensor:
    """(answer tokens,) int64: as they came with the batch to its device, or found here."""
    if "labels" not in batch:
        return torch.empty(0, dtype=torch.long, device=batch["input_ids"].device)
    return batch[ANSWERS] if ANSWERS in batch else answer_places(batch["labels"])


def targets(batch: Batch) -> Tensor:
    """(answer tokens,) int64: the tokens to learn."""
    return batch["labels"].flatten().index_select(0, places_of(batch) + 1)


def token_losses(logits: Tensor, batch: Batch) -> Tensor:
    """(answer tokens,) float32: the cross-entropy of each, from its logits (answer tokens, vocabulary)."""
    return F.cross_entropy(logits.float(), targets(batch), reduction="none")


def samples_of(batch: Batch) -> Tensor:
    """(answer tokens,) int64: the row of the batch that each belongs to."""
    return places_of(batch) // batch["labels"].shape[1]


def per_sample(values: Tensor, batch: Batch) -> Tensor:
    """(batch,): sums of values (answer tokens,)."""
    return values.new_zeros(len(batch["labels"])).index_add(0, samples_of(batch), values)
