"""Image classification: a picture and a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from befit.core.errors import DataError
from befit.tasks.base import Batch, Record, record_name
from befit.tasks.classification import Classification
from befit.tasks.examples import StackedExamples
from befit.tasks.images import WHOLE, ImagePreprocessor


@dataclass(frozen=True)
class ImageExamples(StackedExamples):
    """Labels, and records with their images as they are stored.

    A batch has `pixel_values` (batch, channels, height, width).
    """

    records: Sequence[Record]
    preprocessor: ImagePreprocessor

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        rows: list[int] = torch.as_tensor(indices, dtype=torch.long).tolist()
        names = [record_name(self.records[row], row) for row in rows]
        pixels = self.preprocessor.stack([self.records[row]["image"] for row in rows], names)
        return {"pixel_values": pixels, **super().batch(rows)}


class ImageClassification(Classification):
    """Records hold `image` (see `befit.tasks.images.read_image` for what it may be) and `label`.

    Images are read when a batch needs them.
    """

    name: ClassVar[str] = "image-classification"

    def __init__(
        self, preprocessor: ImagePreprocessor, label_names: Sequence[str], metrics: Sequence[str] = ()
    ) -> None:
        super().__init__(label_names, metrics)
        self.preprocessor = preprocessor

    def prepare(self, records: Sequence[Record]) -> ImageExamples:
        return replace(self.encode(records), columns={"labels": self.labels(records)})

    @property
    def padding(self) -> Mapping[str, int]:
        return {}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels = batch["pixel_values"]
        return model(pixel_values=pixels.to(model.dtype)).logits  # type: ignore[arg-type]

    def as_record(self, value: Any) -> Record:
        # A mapping without an image field is itself an encoded image, {"bytes": ..., "path": ...}.
        return value if isinstance(value, Mapping) and "image" in value else {"image": value}

    def encode(self, records: Sequence[Record]) -> ImageExamples:
        for position, record in enumerate(records):
            where = record_name(record, position)
            if "image" not in record:
                raise DataError(f"{where} has no image; its fields are {', '.join(record) or 'none'}")
            self.preprocessor.check(record["image"], where, whole=len(records) <= WHOLE)
        return ImageExamples({}, records, self.preprocessor)
