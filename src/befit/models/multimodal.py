"""What stands before a model that reads text and images: its tokenizer, its image preprocessing, its image token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from befit.core.errors import ModelError
from befit.core.jsonfile import parse_json
from befit.models.grids import grid_of
from befit.models.processors import image_preprocessor, load_tokenizer
from befit.tasks.images import ImagePreprocessor

if TYPE_CHECKING:
    from befit.tasks.vqa_examples import VqaProcessor


def load_vqa_processor(directory: Path, model: nn.Module, source: str) -> tuple[VqaProcessor, list[str]]:
    """The processor of a checkpoint whose images all take the same number of places of the text, each marked by the
    token `config.image_token_id`, and what had to be decided about it.

    Those are the families of `FAMILIES`, and models that are LLaVA-like: `get_image_features(pixel_values)` gives what
    is put into these places, and nothing stands around them. Images of Qwen-VL all get one size. Raises ModelError for
    models of another kind, and where the tokenizer does not know a token.
    """
    from befit.tasks.vqa_examples import VqaProcessor

    config: Any = model.config
    own: Any = model
    token, vision = getattr(config, "image_token_id", None), getattr(config, "vision_config", None)
    if token is None or vision is None or not hasattr(model, "get_image_features"):
        raise ModelError(
            f"{source} is a {config.model_type}, and vqa needs a model such as LLaVA, whose images stand in the text "
            "as tokens of their own (config.json: image_token_index and vision_config)"
        )
    family = FAMILIES.get(config.model_type)
    if "image_grid_thw" in inspect.signature(own.get_image_features).parameters and family is not QWEN:
        raise ModelError(
            f"{source} is a {config.model_type}, whose images have as many tokens as they have patches; of such "
            "models vqa supports Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and beside them those such as LLaVA and Gemma 3"
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
    processor: Any = images.processor
    if hasattr(processor, "do_image_splitting"):
        processor.do_image_splitting = False  # every image is one piece
    if family is None:
        return VqaProcessor(tokenizer, images, int(token), tokens_per_image(model, images, source)), notes
    frame = family.mark, family.before, family.after
    for text in frame:
        if tokenizer.unk_token_id in (tokens := tokenizer(text, add_special_tokens=False)["input_ids"]) or not tokens:
            raise ModelError(f"{source}: its tokenizer has no {text!r}, which stands for or around an image")
    if family is QWEN:
        grid, images = grid_of(config, int(token), images)
        grid.watch(model)
        notes.append(f"every image becomes a square of {grid.pixels} pixels, which takes {grid.cells} tokens")
        return VqaProcessor(tokenizer, images, grid.token, grid.cells, frame, skipped=grid.skipped), notes
    if family.typed:
        model.register_forward_pre_hook(_with_types(int(token)), with_kwargs=True)
    return VqaProcessor(tokenizer, images, int(token), family.places(config), frame, family.tiled), notes


@dataclass(frozen=True)
class Family:
    """How a family of models has an image in its text, as its processor in transformers writes it.

    mark           what the chat template writes for it
    before, after  the texts around its tokens
    places         how many tokens, by the model's configuration
    tiled          as `VqaProcessor` has it
    typed          whether the model is told which tokens are an image's, which then see each other both ways
    """

    mark: str
    before: str
    after: str
    places: Callable[[Any], int]
    tiled: bool = False
    typed: bool = False


def _shuffled(config: Any) -> int:
    """Patches of an image after `scale_factor` in either direction became one."""
    vision = config.vision_config
    return (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2


_FAKE = "<fake_token_around_image>"
_IDEFICS = Family("<image>", f"{_FAKE}<global-img>", _FAKE, _shuffled, tiled=True)
_BEGIN, _END = "<start_of_image>", "<end_of_image>"
_SEEN, _OVER = "<|vision_start|>", "<|vision_end|>"
QWEN = Family(f"{_SEEN}<|image_pad|>{_OVER}", _SEEN, _OVER, lambda config: 0)  # as many as its `Grid` has cells
FAMILIES = {
    "gemma3": Family(_BEGIN, f"\n\n{_BEGIN}", f"{_END}\n\n", lambda config: config.mm_tokens_per_image, typed=True),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
}


def _with_types(token: int) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = inputs.get("input_ids")
        return args, inputs if ids is None else {"token_type_ids": (ids == token).long(), **inputs}

    return hook


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
            f"({type(error).__name__}: {error}); vqa supports models such as LLaVA 1.5, Gemma 3 and SmolVLM"
        ) from error
    (feature,) = getattr(features, "pooler_output", features)
    return int(feature.shape[-2])
