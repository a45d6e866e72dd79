"""Clients with texts of random tokens on one Llama of random weights, for measurements in which only sizes matter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from befit.adapters.model import AdaptedModel
from befit.core.values import ClientInfo
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks.causal_lm import CausalLM
from befit.tasks.examples import PaddedExamples, pad_right


class _Tokenizer:
    """As much as a task asks of one before it prepares anything."""

    chat_template, pad_token_id = None, 0

    def __init__(self, longest: int) -> None:
        self.model_max_length = longest


def sites(
    clients: int,
    budget: TrainSettings,
    tokens: int,
    answer: int,
    shape: dict[str, Any],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Site]:
    """Each has as many texts as a batch takes, of so many tokens, of which the last `answer` are learnt. No slots are
    installed."""
    torch.manual_seed(0)
    with torch.device(device):
        backbone: Any = LlamaForCausalLM(LlamaConfig(**shape))
    backbone = backbone.to(dtype).eval()
    model, task = AdaptedModel(backbone), CausalLM(_Tokenizer(tokens), tokens)
    made = []
    for number in range(clients):
        ids = torch.randint(0, shape["vocab_size"], (budget.batch_size, tokens)).tolist()
        labels = [[-100] * (tokens - answer) + row[-answer:] for row in ids]
        sequences = {"input_ids": pad_right(ids, 0), "labels": pad_right(labels, -100)}
        examples = PaddedExamples(sequences, torch.full((budget.batch_size,), tokens))
        info = ClientInfo(f"client-{number:02d}", "llama", budget.batch_size)
        made.append(Site(info, model, task, budget, lambda split, examples=examples: examples))
    return made
