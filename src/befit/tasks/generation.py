"""Greedy decoding of a batch, with left padding and a key-value cache.

The loop is written out because `generate` of transformers mixes in a checkpoint's own generation settings, such as a
repetition penalty, and a score should depend on the weights alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from befit.adapters.instance import input_ends


def stop_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's own and those that the checkpoint's generation settings name."""
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    named = named if isinstance(named, (list, tuple)) else [named]
    return frozenset(int(token) for token in (tokenizer.eos_token_id, *named) if token is not None)


def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    stop: Collection[int],
    pad: int,
    max_new_tokens: int,
    max_length: int,
    device: torch.device | str,
    first: Mapping[str, Tensor] | None = None,
) -> list[list[int]]:
    """The most likely continuation of every prompt, token by token, without the token that ended it.

    An answer ends with a token of `stop`, after `max_new_tokens`, or when prompt and answer fill `max_length`, the
    positions of the model; prompts must be shorter than that. The caller puts the model into evaluation mode. Ties go
    to the lower token. Padding is on the left, masked, and positions count from each prompt's first token, so an
    answer does not depend on its neighbours in the batch.

    first  what else the forward pass over the prompts takes, such as the images in them
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    taken = inspect.signature(model.forward).parameters
    # The next token needs the last position alone: all of a prompt's would be (batch, tokens, vocabulary).
    last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    endings = torch.tensor(sorted(stop), device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    room = torch.tensor([min(max_new_tokens, max_length - len(prompt)) for prompt in prompts], device=device)
    running = room > 0
    cache = None
    for step in range(int(room.max())):
        extra = dict(last)
        if "position_ids" in taken:
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if step == 0:
            extra |= first or {}
        with input_ends(-1):
            output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        cache = output.past_key_values
        chosen = output.logits[:, -1].argmax(dim=-1)  # (batch,)
        running = running & ~torch.isin(chosen, endings)
        for row in running.nonzero()[:, 0].tolist():
            answers[row].append(int(chosen[row]))
        running = running & (step + 1 < room)
        if not running.any():
            break
        tokens = torch.where(running, chosen, pad)[:, None]
        # A finished answer takes no further positions: it may stand at the model's last one.
        mask = torch.cat([mask, running.long()[:, None]], dim=1)
    return answers
