"""Prepared conversations with images: padded tokens, and the images of each as the model takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from befit.tasks.base import Batch
from befit.tasks.examples import PaddedExamples
from befit.tasks.images import ImagePreprocessor


@dataclass(frozen=True)
class VqaProcessor:
    """What stands before a model that reads text and images.

    image_token       the token that stands for a piece of an image
    tokens_per_image  how many of them one image takes
    """

    tokenizer: Any
    images: ImagePreprocessor
    image_token: int
    tokens_per_image: int


@dataclass(frozen=True)
class VqaPrompt:
    """What a model reads before its first answer: tokens, an image's in full, and the images (n, channels, h, w)."""

    tokens: Sequence[int]
    pixels: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class VqaExamples(PaddedExamples):
    """Token sequences, and the images that belong to each.

    pixels  for every example (images, channels, height, width) float32, in the order of their places in the text
    records what is scored of each: its task, its form and so on

    A batch has `pixel_values` (batch, most images of an example, channels, height, width), zeros where an example has
    fewer, and their numbers as `images` (batch,).
    """

    pixels: Sequence[Tensor] = ()
    records: Sequence[Mapping[str, Any]] = field(default=())

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        batch = super().batch(indices)
        rows = torch.as_tensor(indices, dtype=torch.long).tolist()
        values, counts = stacked([self.pixels[row] for row in rows])
        return {**batch, "pixel_values": values, "images": counts}


def stacked(pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(examples, most images, channels, height, width), filled with zeros, and the number of images of each."""
    counts = torch.tensor([len(images) for images in pixels], dtype=torch.long)
    values = pixels[0].new_zeros((len(pixels), int(counts.max()), *pixels[0].shape[1:]))
    for row, images in enumerate(pixels):
        values[row, : len(images)] = images
    return values, counts


def forward_arguments(values: Tensor, counts: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a model's forward pass takes: `pixel_values` (all images of the batch, channels, height, width) in the order
    of their places in the text; nothing where there are no images."""
    present = torch.arange(values.shape[1], device=counts.device) < counts[:, None]
    return {"pixel_values": values[present].to(dtype)} if present.any() else {}


def squared(image: np.ndarray, wanted: ImagePreprocessor) -> np.ndarray:
    """Padded to a square on both sides, in the mean colour that the checkpoint's processor takes off, else black.

    LLaVA does so, that nothing of an image is cropped away.
    """
    height, width = image.shape[:2]
    side = max(height, width)
    if height == width:
        return image
    mean = getattr(wanted.processor, "image_mean", None) if getattr(wanted.processor, "do_normalize", False) else None
    depth = image.shape[2] if image.ndim == 3 else 1
    colour = np.asarray(mean if mean is not None and len(mean) == depth else [np.mean(mean or 0.0)] * depth)
    padded = np.broadcast_to(colour.astype(np.float32), (side, side, depth)).copy()
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = image.reshape(height, width, depth)
    return padded
