"""What a client's data look like to a frozen model: mean and spread of all linear inputs (Lee et al. 2025a)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.model import linear_paths
from befit.core.errors import DataError
from befit.core.values import IGNORED
from befit.protocol.site import Site
from befit.tasks import get_task
from befit.tasks.base import Batch

EPSILON = 1e-5


class Moments:
    """Count, mean and unbiased variance of all elements seen so far, in float64 on the device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean, self.variance = torch.zeros_like(self.count), torch.zeros_like(self.count)

    def add(self, values: Tensor) -> None:
        """Merge another batch by the pooled formula:
        `v = ((n1-1) v1 + (n2-1) v2) / (n-1) + n1 n2 (m1-m2)^2 / (n (n-1))`."""
        values = values.detach().flatten().double()
        n1, n2 = self.count, values.numel()
        if not n2:
            return
        mean = values.mean()
        squares = (values - mean).square().sum()  # (n2 - 1) v2, also for a single element
        n = n1 + n2
        inner = (n1 - 1).clamp_min(0) * self.variance + squares + n1 * n2 * (self.mean - mean).square() / n
        self.variance = inner / (n - 1).clamp_min(1)
        self.mean = (n1 * self.mean + n2 * mean) / n
        self.count = n


def linears(backbone: nn.Module) -> dict[str, nn.Module]:
    """Every linear module of the bare backbone by its path, in the order of `named_modules`, beneath any adapters."""
    modules = dict(backbone.named_modules())
    return {path: modules[path] for path in linear_paths(backbone)}


@contextmanager
def _watching(modules: list[nn.Module], seen: list[Moments], mask: list[Tensor | None]) -> Iterator[None]:
    """Adds every input of every module to its moments; tokens outside `mask` (batch, tokens) do not count."""

    def hook(moments: Moments) -> Any:
        def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            h, kept = inputs[0], mask[0]
            moments.add(h[kept] if kept is not None and h.shape[:-1] == kept.shape else h)

        return see

    handles = [module.register_forward_pre_hook(hook(m)) for module, m in zip(modules, seen, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def features(
    site: Site, *slots: str, mask_padding: bool = False, all_padding: bool = False, batch_size: int = 4
) -> Tensor:
    """`[mean_0, sd_0, mean_1, sd_1, …]` of the M linear layers' inputs over all training examples, (2M,) float32.

    slots         adapters of the base model that take part; all others are bypassed
    mask_padding  leave padding out, which makes the result the same for every batch size
    all_padding   count all that the released code counts: texts to classify at model.max_length, prompts at the longest
                  of each batch of four

    Two scalars per layer, over examples, tokens and channels; `sd = sqrt(variance + 1e-5)`. One forward pass, in
    evaluation mode. Of language models only the prompts count, never answers, and no padding unless `all_padding`: with
    causal attention that is what a pass over the prompts alone gives. Raises DataError for a client without training
    examples.
    """
    model, examples = site.model, site.examples("train")
    if not len(examples):
        raise DataError(f"client {site.info.id} has no train examples")
    modules = list(linears(model.backbone).values())
    seen = [Moments(model.device) for _ in modules]
    mask: list[Tensor | None] = [None]
    with model.training(False), model.active(*slots), _watching(modules, seen, mask):
        for start in range(0, len(examples), batch_size):
            batch = site.to_device(examples.batch(torch.arange(start, min(start + batch_size, len(examples)))))
            mask[0] = None
            if all_padding and "input_ids" in batch and "pixel_values" not in batch:
                batch = _as_released(site.task, batch)
            elif get_task(site.task.name).writes_text:
                mask[0] = _is_prompt(batch)
            elif mask_padding and "attention_mask" in batch:
                mask[0] = batch["attention_mask"].bool()
            site.logits(batch)
    rows = [torch.stack([moments.mean, (moments.variance + EPSILON).sqrt()]) for moments in seen]
    return torch.cat(rows).float().cpu()


def _as_released(task: Any, batch: Batch) -> Batch:
    """A batch of texts with the padding of the released code: prompts alone, at the width of the longest of them; texts
    to classify at `model.max_length`. Conversations with images have no such batch."""
    padding = task.tokenizer.pad_token_id
    if get_task(task.name).writes_text:
        kept = _is_prompt(batch)
        kept = kept[:, : int(kept.sum(1).max())]
        tokens = torch.where(kept, batch["input_ids"][:, : kept.shape[1]], padding)
        return {"input_ids": tokens, "attention_mask": kept.long()}
    width = task.max_length - batch["input_ids"].shape[1]
    return {
        name: F.pad(tensor, (0, width), value=padding if name == "input_ids" else 0) if tensor.dim() == 2 else tensor
        for name, tensor in batch.items()
    }


def _is_prompt(batch: Batch) -> Tensor:
    """(batch, tokens) bool: tokens that are neither padding nor part of an answer."""
    return batch["attention_mask"].bool() & (batch["labels"] == IGNORED)
