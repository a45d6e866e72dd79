"""What the scripts of the zoo share: batches of like length, training by AdamW, and the way into the package."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from befit.core.storage import write_json
from befit.tasks.base import Batch, Task
from befit.zoo import FOLDER

__all__ = ["batches_by_length", "descend", "ship", "train_along_cosine"]

logger = logging.getLogger(__name__)

WARMUP = 100
POOL = 16  # batches drawn together and sorted by length, which saves a fifth of the padding


def batches_by_length(
    task: Task, records: Iterator[Mapping[str, Any]], size: int, length: Callable[[Mapping[str, Any]], int]
) -> Iterator[Batch]:
    """Batches of `size` records of about one length each, in random order."""
    while True:
        examples = task.prepare(sorted(islice(records, POOL * size), key=length))
        for first in torch.randperm(POOL):
            yield examples.batch(torch.arange(size) + first * size)


def train_along_cosine(model: Any, task: Task, batches: Iterator[Batch], steps: int, rate: float) -> None:
    """Steps of AdamW, whose learning rate rises for 100 of them and then falls to zero along a cosine."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(islice(batches, steps)):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = task.loss(task.logits(model, batch), batch)
        descend(loss, optimiser, 1.0)
        if step % 100 == 0:
            logger.info("step %d: loss %.3f", step, loss.item())


def descend(loss: Tensor, optimiser: torch.optim.Optimizer, clip: float | None = None) -> None:
    """One step, with the norm of the gradients cut to `clip`."""
    optimiser.zero_grad()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()


def ship(name: str, *parts: Any) -> None:
    """Write a model, and its tokenizer if it has one, into the zoo, and the model's hash into sha256.json."""
    for part in parts:
        part.save_pretrained(FOLDER / name)
    pins = FOLDER / "sha256.json"
    known = json.loads(pins.read_text()) if pins.exists() else {}
    known[name] = hashlib.sha256((FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    write_json(pins, dict(sorted(known.items())))
