"""Bytes of section 5.8 of the Potara specification, from shapes on the meta device: r = 8, float32, LoRA entries alone.

P_A = r L sum d_in and P_B = r L sum d_out over the target modules of one layer:

ViT-B/16, query and value, 12 layers             8*12*(768+768) for both            147,456 and 147,456
Llama-3.2-3B, q/k/v, 28 layers, kv width 1024    8*28*3*3072; 8*28*(3072+2*1024)    2,064,384 and 1,146,880
Qwen3-4B, q/k/v, 36 layers                       8*36*3*2560; 8*36*(4096+2*1024)    2,211,840 and 1,769,472

Totals are 4 bytes times rounds times what goes up: 600 rounds, and R_f = 400, 50, 300 for Potara.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    Qwen3Config,
    ViTConfig,
)

from befit.adapters.keys import factor, slot
from befit.adapters.layout import ModelShapes
from befit.adapters.model import model_shapes
from befit.cost.estimate import communication
from befit.registry import build_method

SIZES = {"vit-b-16": (147_456, 147_456), "llama-3.2-3b": (2_064_384, 1_146_880), "qwen3-4b": (2_211_840, 1_769_472)}
ROUNDS_FEDIT = {"vit-b-16": 400, "llama-3.2-3b": 50, "qwen3-4b": 300}
MEGABYTES = {
    "fedit": (707.8, 7707.0, 9555.1), "fedalt": (707.8, 7707.0, 9555.1), "fedsa": (353.9, 4954.5, 5308.4),
    "potara": (471.9, 642.3, 4777.6),
}  # fmt: skip
QKV = ("q_proj", "k_proj", "v_proj")


@cache
def shapes(model: str) -> ModelShapes:
    with torch.device("meta"):
        if model == "vit-b-16":
            built: nn.Module = AutoModelForImageClassification.from_config(ViTConfig())
            return model_shapes(built, ("q_proj", "v_proj"), head=False)
        if model == "llama-3.2-3b":
            built = AutoModelForCausalLM.from_config(LlamaConfig(
                hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
                intermediate_size=8192, vocab_size=128256,
            ))  # fmt: skip
        else:
            built = AutoModelForCausalLM.from_config(Qwen3Config(
                hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                intermediate_size=9728, vocab_size=151936,
            ))  # fmt: skip
        return model_shapes(built, QKV, head=False)


def total_up(method: str, model: str, **options: int) -> int:
    made = build_method({"name": method, "rank": 8, **options})
    return communication(made, made.layout.specs(shapes(model)), 600, 4)["bytes_up_total"]


@pytest.mark.parametrize("model", SIZES)
def test_the_factors_have_as_many_entries_as_the_paper_counts(model: str) -> None:
    specs = build_method({"name": "fedit", "rank": 8}).layout.specs(shapes(model))
    found = [sum(math.prod(spec.shape) for key, spec in specs.items() if (slot("shared") & factor(part))(key))
             for part in "AB"]  # fmt: skip
    assert tuple(found) == SIZES[model]


@pytest.mark.parametrize("method", MEGABYTES)
@pytest.mark.parametrize("model", SIZES)
def test_uploads_are_those_of_the_table(method: str, model: str) -> None:
    """Exact bytes from the formula, and the table's megabytes to its one decimal."""
    A, B = SIZES[model]
    entries = A if method == "fedsa" else A + B
    options = {"rounds_fedit": ROUNDS_FEDIT[model]} if method == "potara" else {}
    found = total_up(method, model, **options)
    assert found == 4 * entries * options.get("rounds_fedit", 600)
    assert found / 1e6 == pytest.approx(MEGABYTES[method][list(SIZES).index(model)], abs=0.05)


@pytest.mark.parametrize(("model", "percent"), [("vit-b-16", 33.3), ("llama-3.2-3b", 91.7), ("qwen3-4b", 50.0)])
def test_what_potara_saves_of_fedits_uploads_is_the_share_of_rounds(model: str, percent: float) -> None:
    saved = 1 - total_up("potara", model, rounds_fedit=ROUNDS_FEDIT[model]) / total_up("fedit", model)
    assert 100 * saved == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("model", SIZES)
def test_potara_downloads_the_shared_adapter_once_more_than_it_trains_it(model: str) -> None:
    """The merge needs the last average, which no round of training has brought to the client."""
    made = build_method({"name": "potara", "rank": 8, "rounds_fedit": 50})
    found = communication(made, made.layout.specs(shapes(model)), 600, 4)
    assert found["bytes_down_total"] == 4 * sum(SIZES[model]) * 51
    assert found["bytes_up_per_round"] == found["bytes_down_per_round"] == 4 * sum(SIZES[model])


def test_local_sends_nothing() -> None:
    made = build_method({"name": "local", "rank": 8})
    assert set(communication(made, made.layout.specs(shapes("vit-b-16")), 600, 4).values()) == {0}
