"""Greedy decoding of many prompts, with left padding and a key-value cache.

Prompts are read in batches of like length, and answered all together; those that are answered leave the batch. What
follows the prompts in the data can be judged in the passes that read them.

The loop is written out because `generate` of transformers mixes in a checkpoint's own generation settings, such as a
repetition penalty, and a score should depend on the weights alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.instance import Kept, input_ends
from befit.core.caches import cache_name
from befit.tasks.base import by_length

RUNNING = 0.75  # share of a batch that still runs below which the others leave it; copying the cache costs a little

Judge = Callable[[list[int], Tensor], None]


@dataclass(frozen=True)
class Following:
    """What follows every prompt in the data, one token at least, to be judged in the pass that reads the prompt.

    tokens  of each prompt
    judge   takes the places of some prompts, and their logits at the prompt's last token and all that follow it:
            (places, longest + 1, vocabulary)
    """

    tokens: Sequence[Sequence[int]]
    judge: Judge


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
    *,
    batch_size: int = 256,
    seen: Callable[[list[int], bool], Mapping[str, Tensor]] | None = None,
    following: Following | None = None,
    skipped: Sequence[int] = (),
) -> list[list[int]]:
    """The most likely continuation of every prompt, token by token, without the token that ended it.

    An answer ends with a token of `stop`, after `max_new_tokens`, or when prompt and answer fill `max_length`, the
    positions of the model; prompts must be shorter than that. The caller puts the model into evaluation mode. Ties go
    to the lower token. Padding is on the left, masked, and positions count from each prompt's first token, so an
    answer does not depend on its neighbours in the batch.

    batch_size  the most prompts that are answered together
    seen        what else the pass over the prompts at some places takes, such as their images; with True, also what
                the tokens that follow them take
    skipped     how many positions fewer than tokens each prompt takes; empty: none, of no prompt
    """
    reader = _Reader(model, prompts, pad, device, seen, following, skipped)
    room = [min(max_new_tokens, max_length - len(prompt)) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    for batches in _together(reader.lengths, batch_size, device):
        for read in _joined([reader.read(places) for places in batches]):
            _answer(reader, read, answers, room, stop)
    return answers


def _together(lengths: Tensor, batch_size: int, device: torch.device | str) -> Iterator[list[list[int]]]:
    """Batches to be read one by one, with at most `batch_size` prompts that are then answered together."""
    batches: list[list[int]] = []
    for places in by_length(lengths, batch_size, device):
        if batches and sum(map(len, batches)) + len(places) > batch_size:
            yield batches
            batches = []
        batches.append(places.tolist())
    if batches:
        yield batches


@dataclass(frozen=True)
class _Read:
    """Prompts that a model has read, and answers it has begun.

    places  of the prompts
    mask    (prompts, tokens) of what is in the cache
    cache   the model's own; where a model with several adapters runs copies of all prompts side by side, of all copies
    kept    of every prompt, see `input_ends`
    chosen  (prompts,) the next token
    """

    places: list[int]
    mask: Tensor
    cache: Any
    kept: Kept
    chosen: Tensor

    def only(self, rows: list[int]) -> _Read:
        """Some of the prompts, with the same cache, which has these alone then."""
        at, count = torch.tensor(rows, device=self.mask.device), len(self.places)
        copies = torch.arange(len(self.cache.layers[0].keys) // count, device=at.device)
        self.cache.batch_select_indices((copies[:, None] * count + at).flatten())
        return _Read(
            [self.places[row] for row in rows],
            self.mask[at],
            self.cache,
            {name: value[at] for name, value in self.kept.items()},
            self.chosen[at],
        )


class _Reader:
    """Runs the model: over prompts, with what follows them, and over one more token of each."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        pad: int,
        device: torch.device | str,
        seen: Callable[[list[int], bool], Mapping[str, Tensor]] | None,
        following: Following | None,
        skipped: Sequence[int],
    ) -> None:
        self._model, self._prompts, self.pad, self._device = model, prompts, pad, device
        self._seen, self._following = seen, following
        self._skipped = skipped or [0] * len(prompts)
        self._taken, self._cache = inspect.signature(model.forward).parameters, cache_name(model)
        after = [0] * len(prompts) if following is None else map(len, following.tokens)
        self.lengths = torch.tensor([len(prompt) + more for prompt, more in zip(prompts, after, strict=True)])

    def read(self, places: list[int]) -> _Read:
        """Read the prompts at these places, and judge what follows them."""
        prompts = [self._prompts[place] for place in places]
        if self._following is None:
            return self._first(places, prompts, [[] for _ in places])
        read = self._first(places, prompts, [self._following.tokens[place] for place in places])
        # What else a model may keep has seen the tokens that follow, and cannot forget them.
        return read if _is_plain(read.cache) else self._first(places, prompts, [[] for _ in places])

    def _first(self, places: list[int], prompts: list[Sequence[int]], more: list[Sequence[int]]) -> _Read:
        width, longest = max(map(len, prompts)), max(map(len, more))
        tokens = torch.full((len(places), width + longest), self.pad)
        mask = torch.zeros_like(tokens)
        for row, (prompt, after) in enumerate(zip(prompts, more, strict=True)):
            start, stop = width - len(prompt), width + len(after)
            tokens[row, start:stop] = torch.tensor([*prompt, *after])
            mask[row, start:stop] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        kept: Kept = {}
        seen = {} if self._seen is None else self._seen(places, longest > 0)
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        logits, cache = self._forward(tokens, mask, None, kept, longest + 1, seen, counted)
        if longest and self._following is not None:
            self._following.judge(places, logits)
            if _is_plain(cache):
                cache.crop(-longest)
        return _Read(places, mask[:, :width], cache, kept, logits[:, 0].argmax(dim=-1))

    def one_more(self, read: _Read, running: list[bool]) -> _Read:
        """Read the token that was chosen last for those that are running."""
        alive = torch.tensor(running, device=self._device)
        tokens = torch.where(alive, read.chosen, self.pad)[:, None]
        # A finished answer takes no further positions: it may stand at the model's last one.
        mask = torch.cat([read.mask, alive.long()[:, None]], dim=1)
        skipped = torch.tensor([self._skipped[place] for place in read.places], device=self._device)
        counted = mask.sum(1, keepdim=True) - 1 - skipped[:, None]
        logits, cache = self._forward(tokens, mask, read.cache, read.kept, 1, {}, counted)
        return replace(read, mask=mask, cache=cache, chosen=logits[:, -1].argmax(dim=-1))

    def _forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        cache: Any,
        kept: Kept,
        last: int,
        seen: Mapping[str, Tensor],
        positions: Tensor,
    ) -> tuple[Tensor, Any]:
        """The cache, and logits of the last tokens alone: of all they would be (batch, tokens, vocabulary)."""
        extra: dict[str, Any] = dict(seen)
        if "logits_to_keep" in self._taken:
            extra["logits_to_keep"] = last
        if "position_ids" in self._taken:
            extra["position_ids"] = positions
        with input_ends(-last, kept):
            output = self._model(input_ids=tokens, attention_mask=mask, use_cache=True, **{self._cache: cache}, **extra)
        return output.logits[:, -last:], getattr(output, self._cache)


def _answer(reader: _Reader, read: _Read, answers: list[list[int]], room: Sequence[int], stop: Collection[int]) -> None:
    """Write the answers of some prompts, each in its place."""
    running = [room[place] > 0 for place in read.places]
    while True:
        for row, token in enumerate(read.chosen.tolist()):
            if running[row]:
                answer, most = answers[read.places[row]], room[read.places[row]]
                running[row] = token not in stop
                if running[row]:
                    answer.append(token)
                    running[row] = len(answer) < most
        if not any(running):
            return
        if sum(running) <= RUNNING * len(running) and _is_plain(read.cache):
            read = read.only([row for row, runs in enumerate(running) if runs])
            running = [True] * len(read.places)
        read = reader.one_more(read, running)


def _joined(reads: list[_Read]) -> list[_Read]:
    """All that were read, as if in one pass; each by itself where their caches cannot be put together."""
    if len(reads) == 1 or not all(_is_plain(read.cache) for read in reads):
        return reads
    from transformers.cache_utils import DynamicCache

    width = max(read.mask.shape[1] for read in reads)
    more = [width - read.mask.shape[1] for read in reads]
    cache = DynamicCache()
    for number in range(len(reads[0].cache.layers)):
        layers = [read.cache.layers[number] for read in reads]
        sides = [layer.keys for layer in layers], [layer.values for layer in layers]
        keys, values = (_one_below_the_other(side, reads, more) for side in sides)
        cache.update(keys, values, number)
    return [
        _Read(
            [place for read in reads for place in read.places],
            torch.cat([F.pad(read.mask, (add, 0)) for read, add in zip(reads, more, strict=True)]),
            cache,
            {name: torch.cat([read.kept[name] for read in reads]) for name in reads[0].kept},
            torch.cat([read.chosen for read in reads]),
        )
    ]


def _one_below_the_other(values: Sequence[Tensor], reads: Sequence[_Read], more: Sequence[int]) -> Tensor:
    """Keys or values of all reads, (copies * prompts, heads, tokens, width), with so many more tokens on the left."""
    padded = [F.pad(value, (0, 0, add, 0)) for value, add in zip(values, more, strict=True)]
    by_copy = [value.unflatten(0, (-1, len(read.places))) for value, read in zip(padded, reads, strict=True)]
    return torch.cat(by_copy, dim=1).flatten(0, 1)


def _is_plain(cache: Any) -> bool:
    """Whether a cache is nothing but keys and values of all tokens; a sliding window forgets what stood before it."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer and layer.keys is not None for layer in cache.layers
    )
