"""How exact the rounds of public programs for exact aggregation are: their own functions, on random factors.

    git clone https://github.com/CERT-Lab/fedex-lora A && git -C A checkout 2fa2e4a
    git clone https://github.com/boyi-liu/FedLLM-Factory B && git -C B checkout 6a06799
    python benchmarks/exactness.py --fedex-lora A --fedllm-factory B

The error is that of what a round adds to a weight: relative to the weighted mean of `s B_k A_k`, in the Frobenius norm.
befit's methods are held to 1e-6 by tests/property/test_exact_rounds.py.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from common import HERE, publish

CLIENTS, WIDTH, RANK, ALPHA = 5, 32, 8, 32
FACTOR = "base_model.model.0.lora_{}.default.weight"
PAGE = HERE.parent / "docs" / "fedlora.md"


def defined(path: Path, *names: str, **known: Any) -> dict[str, Any]:
    """Functions and classes of a file by themselves, without what the file imports."""
    tree = ast.parse(path.read_text())
    body = [part for part in tree.body if getattr(part, "name", None) in names]
    scope = {"torch": torch, "np": np, **known}
    exec(compile(ast.Module(body, []), str(path), "exec"), scope)
    return scope


def model(transposed: bool = False) -> PeftModel:
    """One square layer with an adapter."""
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(WIDTH, WIDTH) if transposed else nn.Linear(WIDTH, WIDTH, bias=False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"], fan_in_fan_out=transposed)
    return get_peft_model(nn.Sequential(layer), config)  # type: ignore[arg-type]


def factors() -> list[dict[str, Tensor]]:
    """What clients send, all of the same weight."""
    random = torch.Generator().manual_seed(0)
    return [
        {
            FACTOR.format("A"): torch.randn(RANK, WIDTH, generator=random),
            FACTOR.format("B"): torch.randn(WIDTH, RANK, generator=random),
        }
        for _ in range(CLIENTS)
    ]


def error(round_: Callable[[Any, list[dict[str, Tensor]]], None], transposed: bool = False) -> float:
    """Of the change of the layer's weight, with the adapter merged into it, by a round."""
    torch.manual_seed(0)
    whole, sent = model(transposed), factors()
    layer: Any = whole.get_submodule("base_model.model.0")
    start = layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        round_(whole, sent)
        added = layer.base_layer.weight - start + layer.get_delta_weight("default")
        A, B = (torch.stack([lora[FACTOR.format(name)] for lora in sent]) for name in "AB")
        mean = ALPHA / RANK * (B @ A).mean(0)
        mean = mean.T if transposed else mean
    return float((added - mean).norm() / mean.norm())


def fedex_lora(folder: Path) -> Callable[..., None]:
    """`aggregate_models_ours` of the authors' repository, which returns the global model that it was given."""
    ours = defined(folder / "fed_agg.py", "aggregate_models_ours")["aggregate_models_ours"]

    def round_(whole: Any, sent: list[dict[str, Tensor]]) -> None:
        ours(whole, sent, SimpleNamespace(lora_r=RANK, lora_alpha=ALPHA, rslora=False))

    return round_


def fedllm_factory(folder: Path, name: str) -> Callable[..., None]:
    """`Server.aggregate` of one algorithm."""
    known = {"FTBaseServer": object, "FTBaseClient": object, "time_record": lambda function: function}
    aggregate = defined(folder / "alg" / f"{name}.py", "Server", **known)["Server"].aggregate

    def round_(whole: Any, sent: list[dict[str, Tensor]]) -> None:
        start = {key: value.clone() for key, value in whole.state_dict().items() if "lora_" in key}
        clients = [SimpleNamespace(dataset={"train": range(10)}, lora=lora) for lora in sent]
        aggregate(SimpleNamespace(model=whole, global_lora=start, sampled_clients=clients))

    return round_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fedex-lora", type=Path, required=True)
    parser.add_argument("--fedllm-factory", type=Path, required=True)
    given = parser.parse_args()
    authors, factory = fedex_lora(given.fedex_lora), given.fedllm_factory
    found = [
        ("CERT-Lab/fedex-lora, 2fa2e4a", "FedEx-LoRA on `nn.Linear`", error(authors), "the rest is added transposed"),
        ("the same", "FedEx-LoRA on GPT-2's `Conv1D`", error(authors, transposed=True), ""),
        *(
            (
                "boyi-liu/FedLLM-Factory, 6a06799",
                title,
                error(fedllm_factory(factory, name)),
                "`alpha / r` is left out of what moves into the weight",
            )
            for name, title in (("fedexlora", "FedEx-LoRA"), ("flora", "FLoRA"))
        ),
    ]
    publish(
        "exactness",
        "Exact rounds, measured",
        f"What a round adds to a weight, beside the mean of the updates of {CLIENTS} clients of equal weight: relative "
        f"error for random factors of rank {RANK}, alpha {ALPHA}, a weight of {WIDTH} x {WIDTH}. Programs are run as "
        "published, their aggregation by itself; the head of the script says which clones it wants. "
        "befit's FLoRA, FedEx-LoRA and FedMomentum are within 1e-6 "
        "(`tests/property/test_exact_rounds.py`).",
        ["program", "method", "relative error", "why"],
        [[program, method, f"{value:.2g}", why] for program, method, value, why in found],
        [{"program": program, "method": method, "error": value} for program, method, value, _ in found],
        document=PAGE,
    )


if __name__ == "__main__":
    sys.exit(main())
