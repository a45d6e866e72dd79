"""Tiny transformers checkpoints with their tokenizers, written by the tests that load them."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

WORDS = ["good", "bad", "film", "very", "book", "a", "b", "c", "d", "e"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
BERT = {
    "vocab_size": 14,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "initializer_range": 0.3,
}


def without_bitsandbytes(patch: pytest.MonkeyPatch) -> None:
    """As on a machine that does not have it."""
    there = importlib.util.find_spec
    patch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else there(name, *rest)
    )


@dataclass(frozen=True)
class Settings:
    """The model settings that loading reads."""

    id: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    gradient_checkpointing: bool = False
    quantise: str = "none"


def word_tokenizer(specials: list[str], words: list[str] = WORDS, **roles: str | list[str]) -> PreTrainedTokenizerFast:
    """One token per word; `roles` names the special tokens, such as pad_token."""
    vocabulary = {token: index for index, token in enumerate([*specials, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    if "cls_token" in roles:
        cls, sep = (("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"]))
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[cls, sep]
        )
    if "bos_token" in roles:
        bos = (str(roles["bos_token"]), vocabulary[str(roles["bos_token"])])
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=specials[1], **roles)


def bert_tokenizer() -> PreTrainedTokenizerFast:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return word_tokenizer(SPECIALS, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_input_names=names)


def save_bert(path: Path, kind: str = "classifier", labels: tuple[str, ...] = ("neg", "pos"), **changes: int) -> Path:
    """A BERT checkpoint: a "classifier", an "encoder" without a head, or a "masked" model without a pooler."""
    torch.manual_seed(0)
    config = BertConfig(**{**BERT, **changes})
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: index for index, name in enumerate(labels)}
    kinds = {"classifier": BertForSequenceClassification, "encoder": BertModel, "masked": BertForMaskedLM}
    kinds[kind](config).save_pretrained(path)
    bert_tokenizer().save_pretrained(path)
    return path


def save_llama(path: Path, chat_template: str | None = None, **changes: int) -> Path:
    """A language model with beginning, end and padding tokens."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 24,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**{**config, **changes}, tie_word_embeddings=False)).save_pretrained(path)
    words = [*WORDS, "Instruction", "Response", "Input", "###", ":", "user", "assistant", "#", "copy", "reverse"]
    tokenizer = word_tokenizer(
        ["<pad>", "<unk>", "<bos>", "<eos>"], words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    return path


def save_speller(path: Path, merges: int, **changes: int) -> Path:
    """A language model that reads any text in pieces, of which `merges` are of several letters: a tokenizer of its own
    for every number. Logits are far from uniform."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet, specials = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(specials) + merges,
        initial_alphabet=alphabet,
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["reverse upper swap ends drop first star vowels in an on er le st ar"] * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(merges)
    config = {
        "vocab_size": len(made),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 96,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    wide = {**config, **changes}
    LlamaForCausalLM(LlamaConfig(**wide, bos_token_id=None, initializer_range=0.3)).save_pretrained(path)
    made.save_pretrained(path)
    return path


def save_gpt2(path: Path) -> Path:
    """A language model with absolute positions and without a padding token."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(path)
    words = [*WORDS, "Instruction", "Response", "Input", "###", ":"]
    word_tokenizer(["<eos>", "<unk>"], words, eos_token="<eos>").save_pretrained(path)
    return path


def save_vit(path: Path, size: int = 8, channels: int = 1, labels: int = 3, width: int = 16) -> Path:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=size,
        patch_size=2,
        num_channels=channels,
        id2label={index: f"LABEL_{index}" for index in range(labels)},
    )
    ViTForImageClassification(config).save_pretrained(path)
    return path
