"""Forward passes of transformers' models that do not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unasked(device: torch.device) -> Iterator[None]:
    """Let transformers build its masks without looking at values, as it does where it is compiled.

    It looks whether a mask hides anything, to leave it out where it hides nothing, and whether the positions of a row
    start anew, as they do where several texts share it. Either look waits until the device has done all work before
    it. befit puts one text in a row, and gives no mask where none is needed. On a CPU nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    from transformers import masking_utils

    answers = {"is_tracing": lambda tensor=None: True, "find_packed_sequence_indices": lambda position_ids: None}
    before = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    try:
        for name in before:
            setattr(masking_utils, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)
