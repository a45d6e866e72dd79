"""The classification head of a checkpoint: kept where it fits, else new; and whether the rest of the weights fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from befit.adapters.model import base_child
from befit.core.errors import ModelError
from befit.tasks import get_task


def check_causal(config: Any, task: str, source: str) -> None:
    """Raise ModelError where a language model would see the tokens that it is to predict.

    Architectures that also exist as masked language models, such as BERT, look both ways unless they are told to be a
    decoder; transformers builds a language model of them all the same.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if get_task(task).auto_class != "AutoModelForCausalLM":
        return
    # The language model of an encoder-decoder is its decoder; XLM says "causal" instead of is_decoder.
    decoder = any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder", "causal"))
    encoder = config.model_type == "bert-generation" or config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if (encoder and not decoder) or getattr(config, "use_bidirectional_attention", False) is True:
        raise ModelError(
            f"{source} is a {config.model_type} encoder, which sees the tokens that come after; causal-lm needs a "
            "decoder, such as a GPT or Llama model. For an encoder use text-classification"
        )


def label_config(config: Any, task: str, label_names: Sequence[str], source: str) -> list[str]:
    """Write the classes into `config`, in place, and return what was decided.

    Raises ModelError where the checkpoint knows the same classes in another order: its head would answer wrongly.
    """
    if not get_task(task).has_classes:
        return []
    before = [str(config.id2label[index]) for index in sorted(config.id2label)]
    names = list(label_names)
    config.id2label = dict(enumerate(names))  # sets num_labels too
    config.label2id = {name: index for index, name in enumerate(names)}
    if before == names or before == [f"LABEL_{index}" for index in range(len(before))] or len(before) != len(names):
        return []
    if sorted(before) == sorted(names):
        raise ModelError(
            f"{source} was trained with its classes in the order {', '.join(before)}; the data has {', '.join(names)}. "
            "Set data.label_names to the checkpoint's order"
        )
    return [f"the checkpoint's classes ({', '.join(before)}) are taken for {', '.join(names)}"]


def head_modules(model: Any) -> list[str]:
    """Names of the modules beside the base model (`classifier`, `score`, `lm_head`), and the pooler inside it."""
    base = base_child(model)
    return [name for name, _ in model.named_children() if name != base] + [f"{base}.pooler"]


def new_parts(model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Names of the modules, of the head or before it, that have weights which the checkpoint lacks, see
    `check_weights`."""
    names = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    base = f"{base_child(model)}."
    return tuple(sorted({name.split(".")[0] if not name.startswith(base) else f"{base}pooler" for name in names}))


def check_weights(model: Any, info: dict[str, Any], task: str, source: str) -> list[str]:
    """Accept a missing or misshapen classification head; raise ModelError for anything else that was not loaded.

    info  the loading info of `from_pretrained`: missing_keys and mismatched_keys (name, stored shape, wanted shape)

    The head is what lies outside `base_child`, and the pooler before it, which masked language models
    are saved without.
    """
    missing = set(info["missing_keys"])
    mismatched = {name: (tuple(stored), tuple(wanted)) for name, stored, wanted in info["mismatched_keys"]}
    base = f"{base_child(model)}."
    new = missing | mismatched.keys()
    foreign = sorted(name for name in new if name.startswith(base) and not name.startswith(f"{base}pooler."))
    if get_task(task).writes_text:
        foreign = sorted(new)
    if foreign:
        first = foreign[0]
        shapes = "has shape {}, the model's is {}".format(*mismatched[first]) if first in mismatched else "is missing"
        raise ModelError(
            f"{source}: its weights are not those of a {type(model).__name__} as config.json describes it: "
            f"{len(foreign)} of {len(model.state_dict())} tensors are absent or of another shape, first {first}, "
            f"which {shapes}"
        )
    if not new:
        return []
    outputs = [f"{name} (stored with shape {mismatched[name][0]})" if name in mismatched else name for name in new]
    return [f"the checkpoint has no head for these classes; initialised from the seed: {', '.join(sorted(outputs))}"]
