"""Trains `digits-vit-augmented`, the backbone of the `scanners` benchmark.

`python -m scripts.zoo.digits_vit_augmented` rebuilds it from the public images, turned, scaled, shifted, with other
contrast, inverted and noisy by chance: it knows digits in many looks, and no site's look well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scripts.zoo.digits_vit import noisy, trained
from scripts.zoo.training import ship
from torch import Tensor

from befit.data.offline.digits import public_digits

EPOCHS = 400
TURN, SCALE, SHIFT, CONTRAST, INVERTED, NOISE = 0.6, 0.15, 0.25, 0.5, 0.25, 0.15


def uniform(count: int, size: float) -> Tensor:
    """`count` numbers between -size and size."""
    return size * (2 * torch.rand(count) - 1)


def augmented(images: Tensor) -> Tensor:
    """(images, 1, 8, 8) -> the same, each turned by up to 34 degrees, scaled by up to 15 %, moved by up to a pixel,
    contrast times 0.5 to 1.5, inverted for a quarter of them, and noisy."""
    count = len(images)
    angle, scale = uniform(count, TURN), 1 + uniform(count, SCALE)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    rows = torch.stack([cos, -sin, uniform(count, SHIFT), sin, cos, uniform(count, SHIFT)], dim=1)
    places = F.affine_grid(rows.view(count, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, places, align_corners=False)
    contrast = (1 + uniform(count, CONTRAST)).view(-1, 1, 1, 1)
    inverted = (torch.rand(count) < INVERTED).view(-1, 1, 1, 1)
    seen = (0.5 + contrast * (moved - 0.5)).clamp(0, 1)
    return noisy(torch.where(inverted, 1 - seen, seen), NOISE)


def train_digits_vit_augmented() -> torch.nn.Module:
    """The ViT of `digits-vit` after 400 epochs of AdamW on 500 images that differ every time."""
    images, labels = public_digits()
    return trained(torch.from_numpy(images)[:, None], torch.from_numpy(labels), EPOCHS, augmented)


def main() -> None:
    torch.set_num_threads(1)  # the number of threads decides the order of sums, and so the last bits of the weights
    ship("digits-vit-augmented", train_digits_vit_augmented())


if __name__ == "__main__":
    main()
