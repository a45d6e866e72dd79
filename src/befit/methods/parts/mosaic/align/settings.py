"""How backbones are aligned, as one value that a configuration can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from befit.core.schema import POSITIVE, Mark, at_least, check_fields


@dataclass(frozen=True)
class Alignment:
    """The basis of every backbone, aligned to the smallest one's on public records (FedMosaic, Algorithms 3, 4).

    factors     which of them are aligned: "both", "A", "B" or "none"; what is not stays orthonormal and random
    method      A by its "closed" form, or "train" it by mini-batches, as the paper does
    samples     public records for A; null takes all
    samples_up  public records for B; null takes as many as for A
    batch_size  records in a forward pass, and in a step of training (4 in the paper)
    epochs      train: how often the records are gone through
    lr          train: AdamW's learning rate at its height
    weight      train: lambda, how much orthonormal rows count against the distance
    ridge       relative ridge of the closed form and of the correlations
    tie         how strongly directions that do not correlate are left as they are
    finish      B as the correlations give it ("none", the paper), or made orthonormal again ("polar")
    folder      where aligned factors are kept and looked for; null aligns anew for every run
    """

    factors: Literal["both", "A", "B", "none"] = "both"
    method: Literal["closed", "train"] = "closed"
    samples: Annotated[int | None, POSITIVE] = 5000
    samples_up: Annotated[int | None, POSITIVE] = None
    batch_size: Annotated[int, POSITIVE] = 16
    epochs: Annotated[int, POSITIVE] = 1
    lr: Annotated[float, POSITIVE] = 5e-5
    weight: Annotated[float, at_least(0)] = 0.5
    ridge: Annotated[float, POSITIVE] = 1e-6
    tie: Annotated[float, at_least(0)] = 0.0
    finish: Literal["none", "polar"] = "none"
    folder: Annotated[str | None, Mark.SERVER] = None

    @property
    def records(self) -> int:
        """How many public records go through both models in all; 0 where it depends on how many there are."""
        down, up = self.samples or 0, self.samples_up or self.samples or 0
        if self.method == "closed" and self.samples_up in (None, self.samples):
            return down  # one pass is enough
        return down * (self.epochs if self.method == "train" else 1) + up

    def __post_init__(self) -> None:
        check_fields(self, "the alignment")
