"""A backbone's identity: one hash over what it computes with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

# Written by libraries about themselves or the training run, without any effect on what the model computes; and the
# names of the classes, which belong to the data.
VOLATILE = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "architectures",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "pad_token_id",
        "gradient_checkpointing",
        "use_cache",
    }
)


def fingerprint(model: nn.Module, config: dict[str, Any]) -> str:
    """SHA-256 in hex over the checkpoint's configuration and every parameter and buffer as loaded.

    config  the content of config.json, so that the defaults of a library version do not enter

    Covers names, shapes, types and bytes, hence also dtype, quantisation and a newly initialised head. The device, the
    path and the host do not enter. Cost: one pass over the weights.
    """
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue  # quantisation state that is not a tensor
        digest.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        values = tensor.detach().cpu().contiguous()
        if values.numel():
            digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
