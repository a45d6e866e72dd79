"""What stands before a backbone: its tokenizer, or its image preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from befit.core.errors import ModelError
from befit.models.source import reading
from befit.tasks.images import ImagePreprocessor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tokenizer(directory: Path, model: nn.Module, source: str, writes: bool = True) -> tuple[Any, list[str]]:
    """The tokenizer of a checkpoint, fit for padded batches, and what had to be decided about it.

    Without a padding token it gets its end-of-sequence token as one (the attention mask hides it either way), and the
    model is told. Its `model_max_length` is at most the number of positions that the model has.

    writes  whether the model writes answers, which end with that token; ModelError where there is none
    """
    from transformers import AutoTokenizer

    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{source} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save one next to the model"
        )
    with reading(f"{source}: its tokenizer cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    notes = []
    if writes and tokenizer.eos_token_id is None:
        raise ModelError(
            f"{source}: its tokenizer has no end-of-sequence token, with which every answer ends; name one as "
            "eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{source}: its tokenizer has neither a padding nor an end-of-sequence token; add one")
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"the tokenizer has no padding token; {tokenizer.eos_token!r} is used")
    config: Any = model.config
    if len(tokenizer) > config.get_text_config().vocab_size:
        raise ModelError(
            f"{source}: its tokenizer has {len(tokenizer)} tokens and its model {config.get_text_config().vocab_size}; "
            "they do not belong together"
        )
    # Sequence classifiers on decoders find the last real token by it, and rows are padded by the tokenizer's.
    config.pad_token_id = config.get_text_config().pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions(model))
    return tokenizer, notes


def positions(model: nn.Module) -> int:
    """The longest sequence that the model has positions for; a very large number where nothing limits it."""
    config: Any = model.config
    limit: int = getattr(config.get_text_config(), "max_position_embeddings", None) or int(1e9)
    for name, module in model.named_modules():
        # RoBERTa and its kin start counting after the padding index: 514 positions hold 512 tokens.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= int(module.padding_idx) + 1  # type: ignore[arg-type]
            break
    return limit


def image_preprocessor(directory: Path, model: nn.Module, source: str, vision: Any = None) -> ImagePreprocessor:
    """The model's input size and channels, with the checkpoint's own image processor where it ships one.

    vision  configuration of the part that sees, where it is not the model's own
    """
    from transformers import AutoImageProcessor

    config: Any = vision or model.config
    processor = None
    if any((directory / name).is_file() for name in IMAGE_FILES):
        with reading(f"{source}: its image processor cannot be loaded"):
            processor = AutoImageProcessor.from_pretrained(
                directory, backend="pil", local_files_only=True, trust_remote_code=False
            )
    size = getattr(config, "image_size", None)
    if size is None and processor is not None:
        size = processor_size(processor)
    if size is None:
        raise ModelError(f"{source}: neither config.json (image_size) nor a preprocessor configuration gives its size")
    height, width = (size, size) if isinstance(size, int) else size
    return ImagePreprocessor(getattr(config, "num_channels", 3), height, width, processor)


def processor_size(processor: Any) -> tuple[int, int] | None:
    """(height, width) of what an image processor puts out: its crop if it crops, else what it resizes to."""
    for size in (processor.crop_size if getattr(processor, "do_center_crop", False) else None, processor.size):
        if size is not None and size.get("height") and size.get("width"):
            return size["height"], size["width"]
    shortest = processor.size.get("shortest_edge") if processor.size else None
    return (shortest, shortest) if shortest else None
