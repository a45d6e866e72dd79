"""What two bare models feed the same PQ modules for the same public tokens, batch by batch: never all of it at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from befit.adapters.model import AdaptedModel
from befit.adapters.pq import pq_modules
from befit.core.errors import DataError, ModelError
from befit.methods.parts.mosaic.align.tokens import Pooling, matched_rows
from befit.protocol.site import Backbone
from befit.tasks.base import Batch, Examples, to_device

Pairs = dict[str, tuple[Tensor, Tensor]]
"""By place: inputs (n, d_pivot) and (n, d_other) of the PQ module there in either model, float32; modules that read the
same tensor (q, k and v of a block, say) share it."""


@dataclass(frozen=True)
class Paired:
    """Two backbones, their views of the same public records, and where their PQ modules are.

    modules  by place "K.projection": the name of the PQ module there in the pivot and in the other
    """

    pivot: Backbone
    other: Backbone
    examples: tuple[Examples, Examples]
    modules: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, pivot: Backbone, other: Backbone, public: Callable[[str], Examples], blocks: int) -> Paired:
        """Raises DataError without public records, ModelError for PQ modules that are not at the same places."""
        examples = public(pivot.key), public(other.key)
        if not len(examples[0]) or len(examples[0]) != len(examples[1]):
            raise DataError(
                f"aligning two backbones needs the same public records for both; there are "
                f"{len(examples[0])} and {len(examples[1])}"
            )
        return cls(pivot, other, examples, paired_modules(pivot.model, other.model, blocks))

    def batches(self, samples: int, size: int, seed: int) -> Iterator[Pairs]:
        """Inputs of all PQ modules for `samples` records drawn by the seed, in evaluation mode and without adapters.

        Raises DataError where no token of one model belongs to one of the other.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.examples[0]), generator=generator)[:samples]
        matched = False
        for indices in order.split(size):
            both = self.examples[0].batch(indices), self.examples[1].batch(indices)
            groups = matched_rows(both, (self.pivot.task, self.other.task))
            if groups[0] or "input_ids" not in both[0]:
                matched = True
                names = list(zip(*self.modules.values(), strict=True))
                seen = [
                    _inputs(backbone, batch, modules, rows)
                    for backbone, batch, modules, rows in zip(
                        (self.pivot, self.other), both, names, groups, strict=True
                    )
                ]
                yield {
                    place: (seen[0][pivot_module], seen[1][other_module].to(seen[0][pivot_module].device))
                    for place, (pivot_module, other_module) in self.modules.items()
                }
        if not matched:
            raise DataError("no token of the public answers has the same text for both models, which aligning needs")

    def digest(self) -> str:
        """SHA-256 of the pivot's view of the public records."""
        digest = hashlib.sha256()
        for row in range(len(self.examples[0])):
            for name, value in sorted(self.examples[0].batch([row]).items()):
                digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def paired_modules(pivot: AdaptedModel, other: AdaptedModel, blocks: int) -> dict[str, tuple[str, str]]:
    """By place: the PQ module there in either model. Raises ModelError where one lacks a place of the other's."""
    places = [
        {f"{k}.{rest}": name for name, (k, rest) in pq_modules(model.shapes.targets, blocks).items()}
        for model in (pivot, other)
    ]
    if different := places[0].keys() ^ places[1].keys():
        raise ModelError(
            f"two backbones differ in {len(different)} of their PQ modules, first {min(different)!r}; set "
            "adapter.targets to projections that both have"
        )
    return {place: (name, places[1][place]) for place, name in places[0].items()}


class _AllSeen(Exception):
    """Every module has had its input: the rest of the forward pass is not needed."""


@torch.no_grad()
def _inputs(
    backbone: Backbone, batch: Batch, modules: Sequence[str], rows: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Inputs of these modules as (n, d) of the matched tokens, on the model's device.

    One forward pass that ends at the last of them: no logits over a vocabulary are made.
    """
    model = backbone.model
    pooling = Pooling(rows, model.device)
    with model.training(False), model.active(), _collecting(model, modules, pooling) as seen, suppress(_AllSeen):
        backbone.task.logits(model.backbone, to_device(batch, model.device))
    return seen


@contextmanager
def _collecting(model: AdaptedModel, modules: Sequence[str], pooling: Pooling) -> Iterator[dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}
    last: list[Tensor] = []  # the tensor that the module before has read, and its pooled rows

    def keep(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            if not last or last[0] is not inputs[0]:
                last[:] = inputs[0], pooling(inputs[0].detach()).float()
            seen[name] = last[1]
            if len(seen) == len(modules):
                raise _AllSeen

        return hook

    handles = [model.layers[name].register_forward_pre_hook(keep(name)) for name in modules]
    try:
        yield seen
    finally:
        last.clear()
        for handle in handles:
            handle.remove()
