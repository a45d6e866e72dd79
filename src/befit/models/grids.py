"""Qwen-VL: images as rows of patches, and positions in three dimensions.

These models take images of any size, each with as many tokens as it has cells of `merge` x `merge` patches. befit gives
all images one size, so that all have the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from befit.core.caches import cache_of
from befit.tasks.images import ImagePreprocessor

MOST = 16  # cells in either direction; 448 pixels for Qwen2-VL, of which a checkpoint's own limit may leave fewer


@dataclass(frozen=True)
class PatchGrid:
    """A square image of `side` x `side` cells, each of `merge` x `merge` patches of `patch` x `patch` pixels.

    token   that stands for a cell
    frames  how often a patch is repeated: a video has as many pictures in one
    """

    token: int
    side: int
    merge: int
    patch: int
    frames: int

    @property
    def cells(self) -> int:
        return self.side**2

    @property
    def pixels(self) -> int:
        """Of an image in either direction."""
        return self.side * self.merge * self.patch

    @property
    def skipped(self) -> int:
        """How many positions fewer than tokens an image takes: it ends `side` positions after its first."""
        return self.cells - self.side

    def patches(self, pixels: Tensor) -> Tensor:
        """(images, channels, height, width) -> (patches, channels * frames * patch * patch), cell after cell."""
        n, g, m, p = len(pixels), self.side, self.merge, self.patch
        cells = pixels.view(n, -1, g, m, p, g, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
        return cells.unsqueeze(6).expand(*cells.shape[:6], self.frames, p, p).reshape(n * self.cells * m**2, -1)

    def positions(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(3, batch, tokens): in time, height and width. Text has three equal ones that count on from token to token;
        an image stands at one time, its cells at their rows and columns, and what follows goes on after the largest
        (Wang et al. 2024b, Qwen2-VL, section 2.1)."""
        attended = torch.ones_like(tokens) if mask is None else mask.long()
        seen = (tokens == self.token).long()
        before = seen.cumsum(1) - seen
        place = before % self.cells * seen  # within its image
        time = (attended.cumsum(1) - 1).clamp(min=0) - before // self.cells * self.skipped - place
        return torch.stack([time, time + place // self.side, time + place % self.side])

    def watch(self, model: nn.Module) -> None:
        """Let a model take images as (images, channels, height, width), and find positions by itself, but for tokens
        that follow a cache, whose positions it is told."""

        def hook(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            tokens, cache = inputs.get("input_ids"), cache_of(inputs)
            if tokens is not None and (cache is None or not cache.get_seq_length()):
                inputs = {**inputs, "position_ids": self.positions(tokens, inputs.get("attention_mask"))}
            pixels = inputs.get("pixel_values")
            if pixels is None:
                return args, inputs
            size = torch.tensor([[1, self.side * self.merge, self.side * self.merge]], device=pixels.device)
            return args, {
                **inputs,
                "pixel_values": self.patches(pixels),
                "image_grid_thw": size.expand(len(pixels), 3),
            }

        # The inner model: what adds logits up copies the outer one's inputs, along the first dimension.
        model.model.register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[union-attr]


def grid_of(config: Any, token: int, preprocessor: ImagePreprocessor) -> tuple[PatchGrid, ImagePreprocessor]:
    """The grid that all images get, and what makes them so large; colours are as the checkpoint has them."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    vision, processor = config.vision_config, preprocessor.processor
    cell = vision.patch_size * vision.spatial_merge_size
    most = math.isqrt(processor.size["longest_edge"]) // cell if processor is not None else MOST
    side = max(1, min(MOST, most))
    grid = PatchGrid(token, side, vision.spatial_merge_size, vision.patch_size, vision.temporal_patch_size)
    if processor is not None:
        processor = CLIPImageProcessorPil(
            size={"height": grid.pixels, "width": grid.pixels},
            do_center_crop=False,
            resample=processor.resample,
            rescale_factor=processor.rescale_factor,
            do_normalize=processor.do_normalize,
            image_mean=processor.image_mean,
            image_std=processor.image_std,
        )
    return grid, replace(preprocessor, height=grid.pixels, width=grid.pixels, processor=processor)
