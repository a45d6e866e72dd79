"""Sizes of what FedP2EFT and FedL2P send, and of a budget (Lee et al. 2025a, communication cost and setup), from the
shapes of the paper's models with the targets of its code: PEFT's all-linear without a task type."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from befit.cost.architecture import find_architecture
from befit.cost.compare import compare
from befit.protocol.registry import build_method


@dataclass(frozen=True)
class Sizes:
    """M linear modules, L of them adapted; numbers of both networks, and their shares of the backbone in percent, ours
    and the paper's (None where it prints none)."""

    linears: int
    adapted: int
    backbone: int
    generator: int
    rates: int
    shares: tuple[float, float]
    paper: tuple[float | None, float | None]
    labels: int | None = None


MODELS = {
    # 12 blocks of query, key, value and three dense modules, the pooler and the classifier. The paper's 0.2 % would
    # take 16 scales a module, or a hidden layer half as wide, with neither of which Llama's 0.16 % comes out.
    "mbert": Sizes(74, 74, 177_855_747, 747_401, 40_096, (0.420, 0.0225), (0.2, 0.02), labels=3),
    # 28 blocks of seven; the output embedding has features but no adapter. 0.002 % would be one rate for A and B.
    "llama-3.2-3b": Sizes(197, 196, 3_212_749_824, 5_259_869, 89_584, (0.164, 0.0028), (0.16, 0.002)),
    "mobilellama-1.4b": Sizes(169, 168, 1_364_297_728, 3_868_717, 78_272, (0.284, 0.0057), (None, None)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_networks_have_the_sizes_that_the_papers_shapes_give(name: str) -> None:
    """Generator: 2M -> 4M with a shared slope -> 32 L. FedL2P: 2M -> 100 -> 100 -> 2L, and eta."""
    expected = MODELS[name]
    methods = {method: build_method({"name": method}) for method in ("fedp2eft", "fedl2p")}
    rows = compare(find_architecture(name), methods, "all-linear", rounds=150, labels=expected.labels)
    found = {row["method"]: row for row in rows}
    assert {row["adapted_modules"] for row in rows} == {expected.adapted}
    assert {row["backbone_parameters"] for row in rows} == {expected.backbone}
    M, L = expected.linears, expected.adapted
    generator = 2 * M * 4 * M + 4 * M + 1 + 4 * M * 32 * L + 32 * L
    rates = (2 * M + 1) * 100 + 101 * 100 + 101 * 2 * L + 2 * L
    assert found["fedp2eft"]["slots"]["generator"]["total"] == generator == expected.generator
    assert found["fedl2p"]["slots"]["rates"]["total"] == rates == expected.rates
    shares = tuple(100 * size / expected.backbone for size in (generator, rates))
    assert shares == (pytest.approx(expected.shares[0], abs=5e-4), pytest.approx(expected.shares[1], abs=5e-5))
    up = found["fedp2eft"]["upload_bytes_per_round"], found["fedl2p"]["upload_bytes_per_round"]
    assert up == (4 * generator, 4 * (rates + 1))  # and one validation loss
    assert found["fedp2eft"]["slots"]["budgeted"]["head"] == 0  # a target, and no dense update beside it


def test_the_paper_prints_016_percent_for_llama_and_half_of_ours_for_mbert() -> None:
    llama, mbert = MODELS["llama-3.2-3b"], MODELS["mbert"]
    assert round(llama.shares[0], 2) == llama.paper[0] and round(mbert.shares[0], 1) == 2 * (mbert.paper[0] or 0)
    assert round(mbert.shares[1], 2) == mbert.paper[1] and llama.shares[1] == pytest.approx(1.4 * (llama.paper[1] or 0))


@pytest.mark.parametrize(
    ("name", "budgets"), [("mbert", (148, 296, 592, 1184)), ("llama-3.2-3b", (392, 784, 1568, 3136))]
)
def test_budgets_are_r_ranks_for_each_adapted_module(name: str, budgets: tuple[int, ...]) -> None:
    assert tuple(r * MODELS[name].adapted for r in (2, 4, 8, 16)) == budgets
