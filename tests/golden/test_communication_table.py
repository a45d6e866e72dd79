"""Every byte of Zou et al. 2026 (Potara), Table 1 and section 4.3, from the shapes that `befit cost` has built in.

Rank 8, float32, LoRA entries alone (the paper counts no head). Sums of widths over the target modules of one layer give
P_A = r L sum d_in and P_B = r L sum d_out:

ViT-B/16, query and value, 12 layers             8*12*(768+768) both                147,456 and 147,456
Llama-3.2-3B, q/k/v, 28 layers, kv width 1024    8*28*3*3072; 8*28*(3072+2*1024)    2,064,384 and 1,146,880
Qwen3-4B, q/k/v, 36 layers, 32 heads of 128      8*36*3*2560; 8*36*(4096+2*1024)    2,211,840 and 1,769,472

A method that sends s entries in each of R rounds sends 4 R s bytes: with R = 600, P_A + P_B for FedIT, FedDPA and
FedALT, P_A for FedSA, P_B for FFA-LoRA; Potara and Fisher merging send P_A + P_B in R_f = 400, 50 and 300 rounds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from befit.cost.architecture import find_architecture
from befit.cost.arguments import chosen_methods
from befit.cost.compare import compare, with_savings

QKV = ("q_proj", "k_proj", "v_proj")
SETTINGS = {"vit-b-16": (("q_proj", "v_proj"), 400), "llama-3.2-3b": (QKV, 50), "qwen3-4b": (QKV, 300)}
FACTORS = {"vit-b-16": (147_456, 147_456), "llama-3.2-3b": (2_064_384, 1_146_880), "qwen3-4b": (2_211_840, 1_769_472)}
FACTOR_MEGABYTES = {"vit-b-16": (0.590, 0.590), "llama-3.2-3b": (8.258, 4.588), "qwen3-4b": (8.847, 7.078)}
BOTH, MERGED = (707.8, 7707.0, 9555.1), (471.9, 642.3, 4777.6)
UPLOAD_MEGABYTES = {
    "fedit": BOTH,
    "feddpa": BOTH,
    "fedalt": BOTH,
    "fedsa": (353.9, 4954.5, 5308.4),
    "ffa_lora": (353.9, 2752.5, 4246.7),
    "potara": MERGED,
    "fisher_merging": MERGED,
}
CELLS = [
    (name, model, megabytes)
    for name, row in UPLOAD_MEGABYTES.items()
    for model, megabytes in zip(SETTINGS, row, strict=True)
]
BACKBONES = pytest.mark.parametrize("model", SETTINGS)


@cache
def rows(model: str) -> dict[str, dict[str, Any]]:
    """What `befit cost --model … --rank 8 --rounds 600 --set rounds_fedit=…` finds, by method."""
    targets, rounds_fedit = SETTINGS[model]
    chosen = chosen_methods([*UPLOAD_MEGABYTES, "local"], ["rank=8", f"rounds_fedit={rounds_fedit}"])
    methods = {name: method for name, (_, method) in chosen.items()}
    found = with_savings(compare(find_architecture(model), methods, targets, rounds=600))
    return {row["method"]: row for row in found}


@BACKBONES
def test_the_factors_are_those_of_the_paper(model: str) -> None:
    for row in rows(model).values():
        assert (row["parameters"]["A"], row["parameters"]["B"]) == FACTORS[model]
        assert row["parameters"]["head"] == 0
    megabytes = [round(4 * entries / 1e6, 3) for entries in FACTORS[model]]
    assert tuple(megabytes) == FACTOR_MEGABYTES[model]
    sent = rows(model)
    assert sent["fedsa"]["upload_bytes_per_round"] == 4 * FACTORS[model][0]
    assert sent["ffa_lora"]["upload_bytes_per_round"] == 4 * FACTORS[model][1]


@pytest.mark.parametrize(("name", "model", "megabytes"), CELLS)
def test_every_upload_of_the_table_comes_out(name: str, model: str, megabytes: float) -> None:
    """To the byte by the formula, and to the table's decimal."""
    A, B = FACTORS[model]
    entries = {"fedsa": A, "ffa_lora": B}.get(name, A + B)
    rounds = SETTINGS[model][1] if name in ("potara", "fisher_merging") else 600
    found = rows(model)[name]["upload_bytes_total"]
    assert found == 4 * rounds * entries
    assert round(found / 1e6, 1) == megabytes


@pytest.mark.parametrize(("model", "percent"), [("vit-b-16", 33.3), ("llama-3.2-3b", 91.7), ("qwen3-4b", 50.0)])
def test_the_saving_against_fedit_is_the_table_s(model: str, percent: float) -> None:
    """1 - R_f / R; FedIT is the first method, against which savings count."""
    assert round(100 * rows(model)["potara"]["upload_saving"], 1) == percent


def test_potara_is_dearer_than_half_adapters_where_it_runs_many_rounds() -> None:
    """R_f / R = 2/3 of A + B against A alone: 4/3 on CIFAR. 1/2 of A + B against B alone: 1.125 on FLAN."""
    cifar, flan = rows("vit-b-16"), rows("qwen3-4b")
    assert 3 * cifar["potara"]["upload_bytes_total"] == 4 * cifar["fedsa"]["upload_bytes_total"]
    assert 8 * flan["potara"]["upload_bytes_total"] == 9 * flan["ffa_lora"]["upload_bytes_total"]


@BACKBONES
def test_downloads_mirror_uploads_but_for_one_more_adapter_before_a_merge(model: str) -> None:
    """A merge needs the last average, which no round of training has brought to the client."""
    for name, row in rows(model).items():
        extra = 4 * sum(FACTORS[model]) if name in ("potara", "fisher_merging") else 0
        assert row["download_bytes_per_round"] == row["upload_bytes_per_round"]
        assert row["download_bytes_total"] == row["upload_bytes_total"] + extra


@BACKBONES
def test_local_training_sends_nothing(model: str) -> None:
    row = rows(model)["local"]
    assert (row["upload_bytes_total"], row["download_bytes_total"]) == (0, 0)
    assert row["trained_parameters"] == sum(FACTORS[model])
