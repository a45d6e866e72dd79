"""Families of models with images, random and tiny: tokens and pixels as transformers' own processors and models have
them, what is learnt, what is generated, and adapters on what joins the two parts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import Layout, Slot
from befit.adapters.model import AdaptedModel, find_modules
from befit.core.errors import ModelError
from befit.models import load_backbone, load_shapes
from befit.models.grids import PatchGrid
from befit.models.multimodal import FAMILIES
from befit.tasks import make_task
from tests.tiny import random_state
from tests.unit.models.tiny_models import Settings, word_tokenizer

WORDS = ["what", "is", "it", "a", "b", "yes", "no", "user", "model", ":", "?"]
SPECIALS = {
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
}
SPECIALS["smolvlm"] = SPECIALS["idefics3"]
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIALS |= {kind: ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"] for kind in QWEN}
SIDE = 8  # of an image in patches of 2 x 2, of which four become one
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
SEEN = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 2,
    "initializer_range": 0.3,
}


def chat(mark: str) -> str:
    return (
        "{% for m in messages %}{{ m.role }} : {% for part in m.content %}{% if part.type == 'image' %}"
        + mark
        + " {% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
        "{% if add_generation_prompt %}model :{% endif %}"
    )


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma3":
        config = Gemma3Config(
            text_config=Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=32),
            vision_config=SiglipVisionConfig(**SEEN),
            mm_tokens_per_image=4,
            image_token_index=4,
            boi_token_index=5,
            eoi_token_index=6,
        )
        model: Any = Gemma3ForConditionalGeneration(config)
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
        return model
    if kind in QWEN:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
        vision = {"depth": 2, "num_heads": 2, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
        of_2 = {"embed_dim": 16, "mlp_ratio": 2}
        others = {
            "out_hidden_size": 16,
            "window_size": 4,
            "fullatt_block_indexes": [1],
            "deepstack_visual_indexes": [0],
        }
        config, made = {
            "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
            "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
            "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        }[kind]
        model = made(
            config(
                text_config={**TEXT, "rope_parameters": rope},
                vision_config=vision | (of_2 if kind == "qwen2_vl" else others),
                image_token_id=4,
                vision_start_token_id=5,
                vision_end_token_id=6,
                video_token_id=7,
            )
        )
        for parameter in model.model.visual.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model
    make, family = {
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    }[kind]
    text = LlamaConfig(**TEXT)
    return family(make(text_config=text, vision_config=SEEN, scale_factor=2, image_token_id=4, pad_token_id=0))


@dataclass
class OfQwen:
    """What Qwen2VLProcessor gives for images; itself it needs torchvision, for videos."""

    images: Any
    tokenizer: Any

    def __call__(self, text: list[str], images: list[Any], return_tensors: str) -> dict[str, Any]:
        made = self.images(images=images[0], return_tensors=return_tensors)
        parts = text[0].split(SPECIALS["qwen2_vl"][0])
        whole = parts[0]
        for size, part in zip(made["image_grid_thw"], parts[1:], strict=True):
            whole += SPECIALS["qwen2_vl"][0] * (int(size.prod()) // self.images.merge_size**2) + part
        ids = self.tokenizer(whole, return_tensors=return_tensors)["input_ids"]
        return {**made, "input_ids": ids, "mm_token_type_ids": (ids == 4).int()}


def save(kind: str, folder: Any) -> Any:
    """The checkpoint, and its processor where there is one without further libraries."""
    specials = SPECIALS[kind]
    tokenizer = word_tokenizer(
        ["<pad>", "<unk>", "<bos>", "<eos>", *specials], WORDS, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    marks = {"gemma3": specials[1], **dict.fromkeys(QWEN, f"{specials[1]}{specials[0]}{specials[2]}")}
    tokenizer.chat_template = chat(marks.get(kind, specials[0]))
    random_model(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shape = {"height": SIDE, "width": SIDE}
    if kind == "gemma3":
        tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token = specials
        tokenizer.image_token_id, tokenizer.boi_token_id, tokenizer.eoi_token_id = 4, 5, 6
        images: Any = Gemma3ImageProcessorPil(size=shape)
        processor: Any = Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)
    elif kind in QWEN:
        images = Qwen2VLImageProcessorPil(
            size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2}, patch_size=2, merge_size=2
        )
        processor = OfQwen(images, tokenizer)
    else:
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
        )
        processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    images.save_pretrained(folder)
    if kind in ("idefics3", "smolvlm"):  # as published checkpoints have it; befit reads every image whole
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "do_image_splitting": True}))
    return processor


@pytest.fixture(scope="module", params=["gemma3", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    processor = save(request.param, folder)
    loaded = load_backbone(Settings(str(folder)), "vqa", (), 0)
    return folder, processor, loaded.model, make_task("vqa", loaded.processor, max_new_tokens=4)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


RECORDS = [
    {
        "images": [picture(0), picture(1)],
        "conversation": [
            {"role": "user", "content": "<image>what is it ? <image>"},
            {"role": "assistant", "content": "a b"},
        ],
    },
    {
        "images": [picture(2)],
        "conversation": [
            {"role": "user", "content": "<image>is it a ?"},
            {"role": "assistant", "content": "yes"},
        ],
    },
]


def plain(folder: Any, model: Any) -> Any:
    """The same model, as transformers loads it."""
    return type(model).from_pretrained(folder).eval()


def test_tokens_and_pixels_are_those_of_the_processor_and_only_answers_are_learnt(family: Any) -> None:
    folder, processor, model, task = family
    ours = plain(folder, model)
    batch = task.prepare(RECORDS).batch([0, 1])
    first = 0
    for row, record in enumerate(RECORDS):
        question, answer = (turn["content"] for turn in record["conversation"])
        parts = question.split("<image>")
        content = [{"type": "text", "text": parts[0]}] if parts[0] else []
        for part in parts[1:]:
            content += [{"type": "image"}, *([{"type": "text", "text": part}] if part else [])]
        text = task.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        theirs = processor(text=[text], images=[record["images"]], return_tensors="pt")
        asked = theirs["input_ids"][0].tolist()
        learnt = task.tokenizer(answer, add_special_tokens=False)["input_ids"] + [3]
        kept = int(batch["attention_mask"][row].sum())
        assert batch["input_ids"][row, :kept].tolist() == asked + learnt
        assert batch["labels"][row, :kept].tolist() == [-100] * len(asked) + learnt
        pixels, own = theirs["pixel_values"], batch["pixel_values"][first : first + len(record["images"])]
        if isinstance(processor, OfQwen):
            own = PatchGrid(4, 2, 2, 2, 2).patches(own)
        torch.testing.assert_close(own.reshape(pixels.shape), pixels, atol=1e-5, rtol=0)
        first += len(record["images"])
        with torch.no_grad():  # one forward pass of the model as transformers would call it
            given = {key: value for key, value in theirs.items() if key not in ("input_ids", "attention_mask")}
            for types in given.keys() & {"token_type_ids", "mm_token_type_ids"}:
                given[types] = torch.cat([given[types], torch.zeros(1, len(learnt)).to(given[types])], 1)
            whole = torch.tensor([asked + learnt])
            expected = ours(input_ids=whole, **given).logits[0, len(asked) - 1 : -1]
            one = task.prepare([record]).batch([0])
            torch.testing.assert_close(task.logits(model, one), expected, atol=1e-4, rtol=1e-4)
    both = task.sample_losses(task.logits(model, batch), batch)
    single = [task.prepare([record]).batch([0]) for record in RECORDS]
    torch.testing.assert_close(
        both, torch.cat([task.sample_losses(task.logits(model, one), one) for one in single]), atol=1e-4, rtol=1e-4
    )


def test_answers_are_those_of_generate(family: Any) -> None:
    folder, processor, model, task = family
    ours = plain(folder, model)
    config = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=3, pad_token_id=0)
    given = task.predict(model, [{**record, "conversation": record["conversation"][:1]} for record in RECORDS])
    for record, answer in zip(RECORDS, given, strict=True):
        examples = task.prepare([record])
        prompt = torch.tensor([examples.prompts[0].tokens])
        seen = task._seen(model, [examples.prompts[0]], "cpu")
        if isinstance(processor, OfQwen):
            seen = processor(["<|image_pad|>" * len(record["images"])], [record["images"]], "pt")
            seen = {**seen, "input_ids": prompt, "mm_token_type_ids": (prompt == 4).int()}
            del seen["input_ids"]
        out = ours.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **seen)
        assert task.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True) == answer["answer"]


def test_a_skeleton_has_the_same_processor(family: Any) -> None:
    folder, _, _, task = family
    bare = load_shapes(Settings(str(folder)), "vqa", (), "x").processor
    assert (bare.tokens_per_image, bare.frame, bare.tiled) == (4, task.processor.frame, task.processor.tiled)


def test_what_joins_both_parts_can_have_a_slot_of_its_own(family: Any) -> None:
    """Gemma 3's has one matrix that is no linear module, which nothing can be put beside."""
    _, _, model, task = family
    if model.config.model_type == "gemma3":
        with pytest.raises(ModelError, match="no module matches target 'connector'"):
            find_modules(model, ["q_proj", "connector"])
        return
    adapted = AdaptedModel(copy.deepcopy(model), ["q_proj", "connector"], head=False)
    slots = [Slot("shared", 2, 4.0, targets=("q_proj",)), Slot("joint", 2, 4.0, targets=("connector",))]
    adapted.install(Layout(tuple(slots)), 0)
    joint = {"qwen2": ["visual.merger.mlp.0", "visual.merger.mlp.2"]}
    mergers = ("visual.deepstack_merger_list.0", "visual.merger")
    joint["qwen3"] = [f"{merger}.linear_fc{number}" for merger in mergers for number in (1, 2)]
    expected = joint.get(model.config.model_type[:5], ["connector.modality_projection.proj"])
    assert list(adapted.adapted("joint")) == [f"model.{name}" for name in expected]
    assert not set(adapted.adapted("shared")) & set(adapted.adapted("joint")) and len(adapted.adapted("shared")) == 2
    adapted.load(random_state(adapted))
    batch = task.prepare(RECORDS).batch([0, 1])
    with adapted.active("shared", "joint"), adapted.trainable(slot("joint")):
        task.loss(task.logits(adapted.backbone, batch), batch).backward()
    grads: Any = {key: leaf.grad for key, leaf in adapted.leaves(EVERYTHING).items()}
    assert all(bool(grads[key].any()) for key in grads if key.startswith("joint/"))
    assert all(grads[key] is None or not grads[key].any() for key in grads if key.startswith("shared/"))


def test_other_models_whose_images_have_as_many_tokens_as_patches_are_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen2_vl", tmp_path)
    monkeypatch.delitem(FAMILIES, "qwen2_vl")
    with pytest.raises(ModelError, match="is a qwen2_vl, whose images have as many tokens as they have patches"):
        load_backbone(Settings(str(tmp_path)), "vqa", (), 0)


def test_images_of_any_shape_become_one_square_of_at_most_256_tokens(tmp_path: Any) -> None:
    """A checkpoint may allow fewer: 100 pixels in all are 10 x 10, which two cells of four pixels fit into."""
    save("qwen2_vl", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for longest, side in ((10**6, 64), (100, 8)):
        size = {"shortest_edge": 4, "longest_edge": longest}
        file.write_text(json.dumps({**json.loads(file.read_text()), "size": size}))
        loaded = load_backbone(Settings(str(tmp_path)), "vqa", (), 0)
        processor: Any = loaded.processor
        assert processor.images(Image.new("RGB", (30, 7))).shape == (3, side, side)
        assert processor.tokens_per_image == (side // 4) ** 2
        assert f"every image becomes a square of {side} pixels, which takes {(side // 4) ** 2} tokens" in loaded.notes
