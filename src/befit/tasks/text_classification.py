"""Text classification: one text, or a pair, and a label."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from befit.adapters.instance import input_ends
from befit.core.errors import DataError
from befit.tasks.answers import is_causal
from befit.tasks.base import Batch, Record, record_name
from befit.tasks.classification import Classification
from befit.tasks.examples import PaddedExamples, pad_right
from befit.tasks.unasked import unasked

_LOG = logging.getLogger(__name__)


class TextClassification(Classification):
    """Records hold `text`, perhaps `text_pair`, and `label`.

    Texts are tokenised once, cut to `max_length` tokens (special tokens included; the longer of a pair first) and
    padded on the right to the longest of each batch. `truncated` counts the texts that were cut; the first `prepare`
    that cuts any says so in the log.
    """

    name: ClassVar[str] = "text-classification"

    def __init__(
        self, tokenizer: Any, label_names: Sequence[str], max_length: int = 256, metrics: Sequence[str] = ()
    ) -> None:
        super().__init__(label_names, metrics)
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.truncated = 0

    def prepare(self, records: Sequence[Record]) -> PaddedExamples:
        return dataclasses.replace(self.encode(records), columns={"labels": self.labels(records)})

    @property
    def padding(self) -> Mapping[str, int]:
        return {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": 0, "attention_mask": 0}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        # A decoder's first token has seen none of the others.
        ends = batch["attention_mask"].sum(1) - 1 if is_causal(model) else 0
        with input_ends(ends), unasked(batch["input_ids"].device):
            return model(**{name: tensor for name, tensor in batch.items() if name not in ("labels", "weights")}).logits

    def as_record(self, value: Any) -> Record:
        return {"text": value} if isinstance(value, str) else value

    def encode(self, records: Sequence[Record]) -> PaddedExamples:
        fields = ("text", "text_pair") if any("text_pair" in record for record in records) else ("text",)
        for position, record in enumerate(records):
            for field in fields:
                if not isinstance(record.get(field), str):
                    raise DataError(
                        f"{record_name(record, position)}: {field} must be a string, got {record.get(field)!r}"
                        + ("; either every record of a split has a text_pair or none" * (field == "text_pair"))
                    )
        encoded = self._tokenise(records, fields)
        for position, tokens in enumerate(encoded["input_ids"]):
            if not tokens:
                raise DataError(f"{record_name(records[position], position)} has no tokens; is its text empty?")
        padding = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": 0}
        return PaddedExamples(
            sequences={name: pad_right(tokens, padding[name]) for name, tokens in encoded.items()},
            lengths=torch.tensor([len(tokens) for tokens in encoded["input_ids"]], dtype=torch.long),
        )

    def _tokenise(self, records: Sequence[Record], fields: Sequence[str]) -> dict[str, list[list[int]]]:
        """Token ids (and, where the model wants them, token types) of every record, cut to `max_length`."""
        columns = [[record[field] for record in records] for field in fields]
        if not records:
            return {"input_ids": []}
        encoded = self.tokenizer(*columns, return_attention_mask=False, verbose=False)
        encoded = {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
        # The second pass sees only the long ones: a tokenizer that truncates does not say which texts it cut.
        long = [row for row, tokens in enumerate(encoded["input_ids"]) if len(tokens) > self.max_length]
        for row in long:
            texts = [column[row] for column in columns]
            cut = self.tokenizer(*texts, return_attention_mask=False, truncation=True, max_length=self.max_length)
            for name, rows in encoded.items():
                rows[row] = cut[name]
        if long and not self.truncated:
            _LOG.warning(
                "%d of %d texts are longer than %d tokens and were cut (said once); raise model.max_length",
                len(long),
                len(records),
                self.max_length,
            )
        self.truncated += len(long)
        return encoded
