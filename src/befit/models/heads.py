"""The classification head of a checkpoint: kept where it fits, else new; and whether the rest of the weights fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from befit.errors import ModelError

__all__ = ["check_weights", "head_modules", "label_config"]


def label_config(config: Any, task: str, label_names: Sequence[str], found: str) -> list[str]:
    """Write the classes into `config`, in place, and return what was decided.

    Raises ModelError where the checkpoint knows the same classes in another order: its head would answer wrongly.
    """
    if task == "causal-lm":
        return []
    known = [str(config.id2label[index]) for index in sorted(config.id2label)]
    names = list(label_names)
    config.id2label = dict(enumerate(names))  # sets num_labels too
    config.label2id = {name: index for index, name in enumerate(names)}
    if known == names or known == [f"LABEL_{index}" for index in range(len(known))] or len(known) != len(names):
        return []
    if sorted(known) == sorted(names):
        raise ModelError(
            f"{found} was trained with its classes in the order {', '.join(known)}; the data has {', '.join(names)}. "
            "Set data.label_names to the checkpoint's order"
        )
    return [f"the checkpoint's classes ({', '.join(known)}) are taken for {', '.join(names)}"]


def head_modules(model: Any) -> list[str]:
    """Names of the modules beside the base model (`classifier`, `score`, `lm_head`), and the pooler inside it."""
    base = model.base_model_prefix
    return [name for name, _ in model.named_children() if name != base] + [f"{base}.pooler"]


def check_weights(model: Any, info: dict[str, Any], task: str, found: str) -> list[str]:
    """Accept a missing or misshapen classification head; raise ModelError for anything else that was not loaded.

    info  the loading info of `from_pretrained`: missing_keys and mismatched_keys (name, stored shape, wanted shape)

    The head is what lies outside `model.base_model_prefix`, and the pooler before it, which masked language models
    are saved without.
    """
    missing = set(info["missing_keys"])
    mismatched = {name: (tuple(stored), tuple(wanted)) for name, stored, wanted in info["mismatched_keys"]}
    base = f"{model.base_model_prefix}."
    new = missing | mismatched.keys()
    foreign = sorted(name for name in new if name.startswith(base) and not name.startswith(f"{base}pooler."))
    if task == "causal-lm":
        foreign = sorted(new)
    if foreign:
        first = foreign[0]
        shapes = "has shape {}, the model's is {}".format(*mismatched[first]) if first in mismatched else "is missing"
        raise ModelError(
            f"{found}: its weights are not those of a {type(model).__name__} as config.json describes it: "
            f"{len(foreign)} of {len(model.state_dict())} tensors are absent or of another shape, first {first}, "
            f"which {shapes}"
        )
    if not new:
        return []
    outputs = [f"{name} (stored with shape {mismatched[name][0]})" if name in mismatched else name for name in new]
    return [f"the checkpoint has no head for these classes; initialised from the seed: {', '.join(sorted(outputs))}"]
