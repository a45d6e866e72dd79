"""Image classification: a picture and a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from befit.core.errors import DataError
from befit.tasks.base import Batch, Record, record_name
from befit.tasks.classification import Classification
from befit.tasks.examples import StackedExamples
from befit.tasks.images import ImagePreprocessor


class ImageClassification(Classification):
    """Records hold `image` (see `befit.tasks.images.read_image` for what it may be) and `label`.

    Images are read and preprocessed once and kept in memory: 4 * channels * height * width bytes each.
    """

    name: ClassVar[str] = "image-classification"

    def __init__(self, preprocessor: ImagePreprocessor, label_names: Sequence[str]) -> None:
        super().__init__(label_names)
        self.preprocessor = preprocessor

    def prepare(self, records: Sequence[Record]) -> StackedExamples:
        return StackedExamples({**self.encode(records).columns, "labels": self.labels(records)})

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels = batch["pixel_values"]
        return model(pixel_values=pixels.to(model.dtype)).logits  # type: ignore[arg-type]

    def as_record(self, value: Any) -> Record:
        # A mapping without an image field is itself an encoded image, {"bytes": ..., "path": ...}.
        return value if isinstance(value, Mapping) and "image" in value else {"image": value}

    def encode(self, records: Sequence[Record]) -> StackedExamples:
        shape = (self.preprocessor.channels, self.preprocessor.height, self.preprocessor.width)
        pixels = torch.empty((len(records), *shape))
        for position, record in enumerate(records):
            where = record_name(record, position)
            if "image" not in record:
                raise DataError(f"{where} has no image; its fields are {', '.join(record) or 'none'}")
            pixels[position] = self.preprocessor(record["image"], where)
        return StackedExamples({"pixel_values": pixels})
