"""Prepared conversations with images: padded tokens, and the images of each as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    frame             what the chat template writes for an image, and the texts before and after those tokens; None: it
                      writes one of the tokens, and nothing is around them
    tiled             whether the model takes pieces of each image, (images, pieces, channels, height, width): one piece
                      here, the whole
    skipped           how many positions fewer than tokens an image takes
    """

    tokenizer: Any
    images: ImagePreprocessor
    image_token: int
    tokens_per_image: int
    frame: tuple[str, str, str] | None = None
    tiled: bool = False
    skipped: int = 0


@dataclass(frozen=True)
class Images:
    """The images of one record, in the order of their places in the text, read when they are needed."""

    stored: Sequence[Any]
    preprocessor: ImagePreprocessor
    where: str

    @property
    def names(self) -> list[str]:
        return [f"{self.where}, image {number}" for number in range(1, len(self.stored) + 1)]

    def check(self, whole: bool) -> None:
        """Raise DataError for one that cannot be read; of a picture only its head is, unless `whole`."""
        for image, name in zip(self.stored, self.names, strict=True):
            self.preprocessor.check(image, name, whole)

    @property
    def pixels(self) -> Tensor:
        """(images, channels, height, width) float32, as the model takes them."""
        return self.preprocessor.stack(self.stored, self.names)


@dataclass(frozen=True)
class VqaPrompt:
    """What a model reads before its first answer: tokens, an image's in full, and the images."""

    tokens: Sequence[int]
    images: Images

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class VqaExamples(PaddedExamples):
    """Token sequences, and the images that belong to each.

    images  of every example
    records what is scored of each: its task, its form and so on

    A batch has `pixel_values` (all its images, channels, height, width) in the order of their places in the text, where
    it has images.
    """

    images: Sequence[Images] = ()
    records: Sequence[Mapping[str, Any]] = field(default=())

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        batch = super().batch(indices)
        rows = torch.as_tensor(indices, dtype=torch.long).tolist()
        return {**batch, **pixel_values([self.images[row] for row in rows])}


def pixel_values(images: Sequence[Images]) -> dict[str, Tensor]:
    """What a model takes beside the text of some records: all their images; nothing where there are none."""
    pixels = torch.cat([of_record.pixels for of_record in images])
    return {"pixel_values": pixels} if len(pixels) else {}
