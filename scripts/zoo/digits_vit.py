"""Trains `digits-vit`, the backbone of the `digits` benchmark: `python -m scripts.zoo.digits_vit` rebuilds it.

Only the public part of the data is seen. Every image is rolled sideways and made noisy, so that the model knows digits
but not the clients' ones: there has to be something left to adapt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from scripts.zoo.training import descend, ship
from torch import Tensor

from befit.data.offline.digits import public_digits

EPOCHS, BATCH, RATE, NOISE, SEED = 60, 50, 1e-3, 0.35, 0


def train_digits_vit() -> torch.nn.Module:
    """A ViT of 136,138 parameters after 60 epochs of AdamW on 500 images."""
    images, labels = public_digits()
    pixels = torch.roll(torch.from_numpy(images)[:, None], 1, dims=-1)  # (500, 1, 8, 8)
    return trained(pixels, torch.from_numpy(labels), EPOCHS, lambda batch: noisy(batch, NOISE))


def noisy(pixels: Tensor, size: float) -> Tensor:
    return (pixels + size * torch.randn(pixels.shape)).clamp(0, 1)


def trained(pixels: Tensor, targets: Tensor, epochs: int, seen: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """A new ViT after so many epochs of AdamW on what `seen` makes of each batch of images (batch, 1, 8, 8)."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = new_digits_vit()
        optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
        model.train()
        for _ in range(epochs):
            for batch in torch.randperm(len(targets)).split(BATCH):
                loss = F.cross_entropy(model(pixel_values=seen(pixels[batch])).logits, targets[batch])
                descend(loss, optimiser)
    return model.eval()


def new_digits_vit() -> torch.nn.Module:
    """A ViT for images of 8 x 8, untrained."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=8,
        patch_size=2,
        num_channels=1,
        id2label={i: str(i) for i in range(10)},
        label2id={str(i): i for i in range(10)},
    )
    return ViTForImageClassification(config)


def main() -> None:
    torch.set_num_threads(2)  # the number of threads decides the order of sums, and so the last bits of the weights
    ship("digits-vit", train_digits_vit())


if __name__ == "__main__":
    main()
