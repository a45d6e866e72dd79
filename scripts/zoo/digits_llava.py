"""Trains the backbones of the `digits-vqa` benchmark: `python -m scripts.zoo.digits_llava` rebuilds both sizes.

LLaVA's layout from scratch (docs/digits-vqa.md): a CLIP tower over 8 x 8 pixels, a projector, and a
Llama over characters, all trained together on questions about the public digits, which no client holds.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from scripts.zoo.skills_llama import character_tokenizer, ship

from befit.data.offline.digits import load
from befit.data.offline.digits_vqa import BLOCKS, pool_of
from befit.data.offline.digits_vqa_tasks import generated_records
from befit.tasks import make_task
from befit.tasks.base import Batch, Task
from befit.tasks.images import ImagePreprocessor
from befit.tasks.vqa_examples import VqaProcessor
from befit.zoo import FOLDER

__all__ = ["SIZES", "Size", "train_digits_llava", "vqa_tokenizer"]

logger = logging.getLogger(__name__)

STEPS, BATCH, RATE, WARMUP, SEED = 1500, 32, 2e-3, 100, 0
POSITIONS = 128
PATCHES = 16  # of 2 x 2 pixels, the places that an image takes in the text
POOL = 16  # batches drawn together and sorted by length, which saves padding
SPREAD = 0.1  # of initial weights, as in the backbones of `skills`
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content + eos_token }}{% else %}"
    "{{ message.content + '\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int


SIZES = {"digits-llava-s": Size(64, 4), "digits-llava-l": Size(96, 6)}


def vqa_tokenizer() -> Any:
    """The 99 characters of the backbones of `skills`, and a token for a piece of an image."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(size: Size, tokenizer: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_channels=1,
        image_size=8,
        patch_size=2,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def train_digits_llava(size: Size, steps: int = STEPS) -> tuple[Any, Any]:
    """The model and its tokenizer. AdamW; the rate rises for 100 steps and then falls to zero along a cosine."""
    tokenizer = vqa_tokenizer()
    processor = VqaProcessor(tokenizer, ImagePreprocessor(1, 8, 8), tokenizer.convert_tokens_to_ids("<image>"), PATCHES)
    task = make_task("vqa", processor, max_length=POSITIONS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make_model(size, tokenizer).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        for step, batch in enumerate(islice(training_batches(task), steps)):
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = task.loss(task.logits(model, batch), batch)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if step % 100 == 0:
                logger.info("step %d: loss %.3f", step, loss.item())
    return model.eval(), tokenizer


def training_batches(task: Task) -> Iterator[Batch]:
    """Batches of one length or nearly, in random order, about public images alone."""
    images, labels = load()
    records = generated_records(images, pool_of(labels, BLOCKS["public"]), "zoo")
    while True:
        pool = sorted(islice(records, POOL * BATCH), key=lambda one: len(one["images"]))
        examples = task.prepare(pool)
        for first in torch.randperm(POOL):
            yield examples.batch(torch.arange(BATCH) + first * BATCH)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # the number of threads decides the order of sums, and so the last bits of the weights
    for name in sys.argv[1:] or SIZES:
        model, tokenizer = train_digits_llava(SIZES[name])
        ship(name, model, tokenizer)
        logger.info("%s: %d parameters in %s", name, model.num_parameters(), FOLDER / name)


if __name__ == "__main__":
    main()
