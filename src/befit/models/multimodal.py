"""What stands before a model that reads text and images: its tokenizer, its image preprocessing, its image token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from befit.core.errors import ModelError
from befit.core.jsonfile import parse_json
from befit.models.processors import image_preprocessor, load_tokenizer
from befit.tasks.images import ImagePreprocessor

if TYPE_CHECKING:
    from befit.tasks.vqa_examples import VqaProcessor


def load_vqa_processor(directory: Path, model: nn.Module, source: str) -> tuple[VqaProcessor, list[str]]:
    """The processor of a LLaVA-like checkpoint, and what had to be decided about it.

    LLaVA-like: every image takes the same number of places of the text, each marked by the token
    `config.image_token_id`, and `get_image_features(pixel_values)` gives what is put there. Raises ModelError for
    models of another kind, and where the tokenizer does not know that token.
    """
    from befit.tasks.vqa_examples import VqaProcessor

    config: Any = model.config
    token, vision = getattr(config, "image_token_id", None), getattr(config, "vision_config", None)
    if token is None or vision is None or not hasattr(model, "get_image_features"):
        raise ModelError(
            f"{source} is a {config.model_type}, and vqa needs a model such as LLaVA, whose images stand in the text "
            "as tokens of their own (config.json: image_token_index and vision_config)"
        )
    tokenizer, notes = load_tokenizer(directory, model, source)
    if not 0 <= token < len(tokenizer):
        raise ModelError(
            f"{source}: its image token {token} is none of the {len(tokenizer)} of its tokenizer; save the "
            "tokenizer with it"
        )
    if not tokenizer.chat_template and (template := processor_template(directory)):
        tokenizer.chat_template = template
        notes.append("the chat template is that of chat_template.json")
    images = image_preprocessor(directory, model, source, vision)
    return VqaProcessor(tokenizer, images, int(token), tokens_per_image(model, images, source)), notes


def processor_template(directory: Path) -> str | None:
    """The chat template that older checkpoints keep for their processor, where their tokenizer has none."""
    try:
        data = (directory / "chat_template.json").read_bytes()
        template = parse_json(data, "chat_template.json", ModelError, 2**20)["chat_template"]
    except (OSError, ModelError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def tokens_per_image(model: Any, images: ImagePreprocessor, source: str) -> int:
    """How many places of the text one image takes, counted on a black image; on the meta device without computing."""
    parameter = next(model.parameters())
    black = torch.zeros(1, images.channels, images.height, images.width, device=parameter.device, dtype=model.dtype)
    try:
        with torch.no_grad():
            features = model.get_image_features(pixel_values=black)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{source}: a {type(model).__name__} takes more than pixel values to read an image "
            f"({type(error).__name__}: {error}); vqa supports models such as LLaVA 1.5"
        ) from error
    (feature,) = getattr(features, "pooler_output", features)
    return int(feature.shape[-2])
