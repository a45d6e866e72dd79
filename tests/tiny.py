"""Tiny random transformers of four architectures, tasks on random data, and sites around them. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from befit.adapters.layout import Layout, lora
from befit.adapters.model import AdaptedModel
from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, State
from befit.protocol.method import Method, federated_stage, run_stages
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Exchange
from befit.tasks.base import Examples, Task
from befit.tasks.causal_lm import CausalLM
from befit.tasks.examples import PaddedExamples, StackedExamples, pad_right
from befit.tasks.image_classification import ImageClassification
from befit.tasks.images import ImagePreprocessor
from befit.tasks.text_classification import TextClassification

CLASSES = ("zero", "one", "two")
_VOCABULARY = 32
_WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
# Wide enough that attention and logits are far from uniform: an error of 1e-6 then shows.
_SPREAD: dict[str, Any] = {"initializer_range": 0.3, "attn_implementation": "eager"}


def federated(method: Method) -> Exchange:
    """What a method does in its last stage in which something leaves the clients."""
    stage = federated_stage(run_stages(method))
    assert stage is not None
    return stage.exchange


def tiny_model(kind: str, dropout: float = 0.0) -> nn.Module:
    """A random model, the same for the same arguments. `dropout` is the backbone's own."""
    torch.manual_seed(derive_seed("tiny model", kind))
    labels: dict[str, Any] = {
        "id2label": dict(enumerate(CLASSES)),
        "label2id": {name: i for i, name in enumerate(CLASSES)},
    }
    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "vit":
        config = ViTConfig(**_WIDTH, **_SPREAD, **labels, **drop, image_size=4, patch_size=2, num_channels=1)
        return ViTForImageClassification(config).eval()
    if kind == "bert":
        config = BertConfig(**_WIDTH, **_SPREAD, **labels, **drop, vocab_size=_VOCABULARY, max_position_embeddings=16)
        return BertForSequenceClassification(config).eval()
    if kind == "llama":
        config = LlamaConfig(**_WIDTH, **_SPREAD, vocab_size=_VOCABULARY, num_key_value_heads=1, pad_token_id=0)
        return LlamaForCausalLM(config).eval()
    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        vocab_size=_VOCABULARY,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **_SPREAD,
    )
    return GPT2LMHeadModel(config).eval()


def tiny_task(kind: str) -> Task:
    if kind == "vit":
        return ImageClassification(ImagePreprocessor(1, 4, 4), CLASSES)
    words = {f"w{index}": index for index in range(_VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )
    return TextClassification(tokenizer, CLASSES) if kind == "bert" else CausalLM(tokenizer)


def tiny_examples(kind: str, count: int, seed: int = 0) -> Examples:
    """Random examples; texts have different lengths, and language models learn the end of each only."""
    draw = torch.Generator().manual_seed(derive_seed("tiny examples", kind, seed))
    labels = torch.randint(len(CLASSES), (count,), generator=draw)
    if kind == "vit":
        return StackedExamples({"pixel_values": torch.randn(count, 1, 4, 4, generator=draw), "labels": labels})
    lengths = torch.randint(4, 9, (count,), generator=draw)
    tokens = [torch.randint(2, _VOCABULARY, (int(n),), generator=draw).tolist() for n in lengths]
    sequences = {"input_ids": pad_right(tokens, 0)}
    if kind == "bert":
        return PaddedExamples(sequences, lengths, {"labels": labels})
    prompts = torch.randint(1, 4, (count,), generator=draw).tolist()
    learnt = [[-100] * p + row[p:] for p, row in zip(prompts, tokens, strict=True)]
    return PaddedExamples({**sequences, "labels": pad_right(learnt, -100)}, lengths)


def random_state(model: AdaptedModel, seed: int = 0, size: float = 0.3) -> State:
    """Values for every array of the installed layout, none of them zero."""
    draw = torch.Generator().manual_seed(derive_seed("random state", seed))
    return {key: size * torch.randn(spec.shape, generator=draw) for key, spec in model.specs.items()}


def make_site(
    kind: str,
    layout: Layout | None = None,
    *,
    rows: int = 12,
    client: str = "client-01",
    data_seed: int = 0,
    dropout: float = 0.0,
    adapter_dropout: float = 0.0,
    targets: str | tuple[str, ...] = "auto",
    model: AdaptedModel | None = None,
    budget: TrainSettings | None = None,
) -> Site:
    """A client with a tiny model, or with `model`, at initial adapters, and random data that `data_seed` decides."""
    if model is None:
        head = kind in ("vit", "bert")
        model = AdaptedModel(tiny_model(kind, dropout), targets, head=head, dropout=adapter_dropout)
    model.install(layout or lora(rank=2, alpha=6.0), seed=0)
    splits = {name: tiny_examples(kind, rows, derive_seed(data_seed, name)) for name in ("train", "val", "test")}
    settings = budget or TrainSettings(max_steps=3, batch_size=4, lr=1e-2)
    return Site(ClientInfo(client, "tiny", rows), model, tiny_task(kind), settings, splits.__getitem__)


MakeSite = Callable[..., Site]


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def assert_near(first: dict[str, Tensor], second: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )
