"""Stable seeds: every random draw has an owner, and its seed depends on names, never on order or on `hash()`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any mix of numbers and names, the same in every process and on every machine.

    >>> derive_seed(0, "federate", 3, "client-01") == derive_seed(0, "federate", 3, "client-01")
    True
    >>> derive_seed(1, "a") == derive_seed(1, "b")
    False
    """
    digest = hashlib.sha256("\x1f".join(f"{type(part).__name__}:{part}" for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed what is drawn without a generator, on the CPU and on this device, to the numbers of `torch.manual_seed`.

    That writes down where it was called from, once for every kind of accelerator that PyTorch knows: a millisecond.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
