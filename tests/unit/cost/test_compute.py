"""Compute and memory of a training step, against FedMosaic (Seo et al. 2026), Table 15."""

from __future__ import annotations

import pytest

from befit.adapters.keys import NOTHING, Selector, slot
from befit.adapters.layout import lora
from befit.adapters.model import model_shapes
from befit.cost.architecture import find_architecture
from befit.cost.compare import compare
from befit.cost.compute import count, relative_compute, relative_memory
from befit.protocol.registry import build_method, method_names
from befit.protocol.work import Work

LLAVA_3B = "llava-llama-3.2-3b"
# Entries of one LoRA of rank 128 on all seven linear layers of every block: none on tower or projector.
ADAPTER = {
    "llava-llama-3.2-1b": 90_177_536,
    "llava-llama-3.2-3b": 194_510_848,
    "llava-llama-3.1-8b": 335_544_320,
    "llava-qwen2.5-0.5b": 70_385_664,
    "llava-qwen2.5-1.5b": 147_718_144,
    "llava-qwen2.5-3b": 239_468_544,
}
BOTH = ("shared", "personal")


def own(name: str) -> Selector:
    return slot(name)


@pytest.mark.parametrize("name", ADAPTER)
def test_an_adapter_of_a_model_that_sees_images_is_on_its_language_model_alone(name: str) -> None:
    shapes = model_shapes(find_architecture(name).skeleton(), "all", head=False)
    assert count(lora(128, 256.0).specs(shapes)) == ADAPTER[name]


# The paper's figures for LLaVA-Llama-3B at rank 128, N = 3,528,846,336 and n = 194,510,848: derivation beside each.
TABLE_15 = {
    "SFT": (1.000, [Work(("shared",), own("shared"))]),  # 2N + 3n
    "DITTO": (2.000, [Work(("shared",), own("shared")), Work(("personal",), own("personal"))]),
    # The shared adapter's step, and one of the personal adapter beside the frozen one: 2(2N + 3n) + 2n.
    "FedDPA": (2.051, [Work(("shared",), own("shared")), Work(BOTH, own("personal"))]),
    # A teacher's forward pass with both, the shared step, the pair's step: (N + 2n) + (2N + 3n) + (2N + 5n).
    "FedDAT": (2.564, [Work(BOTH), Work(("shared",), own("shared")), Work(BOTH, own("personal"))]),
    # As published, one backward pass: (2N + 3n) + (N + n). Both adapters train, so an honest count is 2.000.
    "FedSim": (1.487, [Work(("shared",), own("shared")), Work(("personal",))]),
}


@pytest.mark.parametrize("name", TABLE_15)
def test_figures_of_table_15_follow_from_passes(name: str) -> None:
    published, work = TABLE_15[name]
    shapes = model_shapes(find_architecture(LLAVA_3B).skeleton(), "all", head=False)
    specs = lora(128, 256.0, BOTH).specs(shapes)
    found = relative_compute(work, specs, own("shared"), 3_528_846_336)
    assert found == pytest.approx(published, abs=5e-4)


def test_a_second_and_a_third_adapter_hold_what_the_paper_says() -> None:
    """Table 15's M: 1.052 for two adapters, 1.104 for three: (N + c n) / (N + n)."""
    shapes = model_shapes(find_architecture(LLAVA_3B).skeleton(), "all", head=False)
    for slots, published in (((*BOTH,), 1.052), ((*BOTH, "teacher"), 1.104)):
        specs = lora(128, 256.0, slots).specs(shapes)
        assert relative_memory(specs, own("shared"), 3_528_846_336) == pytest.approx(published, abs=5e-4)


def test_a_forward_pass_now_and_then_counts_by_its_share() -> None:
    shapes = model_shapes(find_architecture(LLAVA_3B).skeleton(), "all", head=False)
    specs = lora(128, 256.0).specs(shapes)
    step = Work(("shared",), own("shared"))
    once_in_ten = [step, Work((), NOTHING, 0.1)]
    units = 2 * 3_528_846_336 + 3 * 194_510_848
    assert relative_compute(once_in_ten, specs, own("shared"), 3_528_846_336) == pytest.approx(
        1 + 0.1 * 3_528_846_336 / units
    )


def test_registered_methods_give_the_figures_of_their_own_passes() -> None:
    methods = {name: build_method(name) for name in ("fedit", "ditto", "feddpa", "local", "ffa_lora")}
    methods["function"] = build_method({"name": "guidance", "guide": "function"})
    rows = {row["method"]: row for row in compare(find_architecture(LLAVA_3B), methods, "all", rounds=1)}
    assert [round(rows[name]["compute"], 3) for name in ("fedit", "local", "ditto")] == [1.0, 1.0, 2.0]
    assert rows["ffa_lora"]["compute"] < 1
    assert 1.4 < rows["function"]["compute"] < 1.55  # a step and a teacher's forward pass
    assert rows["ditto"]["memory"] > rows["fedit"]["memory"] == 1.0


def test_a_rounds_work_on_public_records_is_counted_in_records_of_fine_tuning() -> None:
    """80 records. PerAda: the student's pass is one, a teacher's forward (N + n) / (2N + 3n). TAKFL: one such forward
    more, its own answers. FedMKT: at most one of either, at clients and at the server. FedIT: nothing."""
    N, n = 3_528_846_336, ADAPTER[LLAVA_3B]
    forward = 80 * (N + n) / (2 * N + 3 * n)
    names = ("fedit", "perada", "takfl", "fedmkt")
    methods = {name: build_method({"name": name, "rank": 128}) for name in names}
    rows = compare(find_architecture(LLAVA_3B), methods, "all", rounds=1)
    assert [row["compute"] for row in rows] == pytest.approx([1, 2, 1, 1])
    found = {row["method"]: row["public_records"] for row in rows}
    assert found["fedit"] is None
    for name, expected in {
        "perada": {"client": 0, "server": 80, "each": forward},
        "takfl": {"client": 0, "server": 80 + forward, "each": forward},
        "fedmkt": {"client": 80 + forward, "server": 80 + forward, "each": 0},
    }.items():
        assert found[name] == pytest.approx(expected), name


# Why a step can cost less than one of plain fine-tuning.
CHEAPER = {
    "ffa_lora": "A is frozen, so it has no gradients: 2N + 2n + n / 2 where A and B are alike in size",
    "fedsvd": "the same",
    "fed_sb": "A and B are frozen",
}


@pytest.mark.parametrize("name", method_names())
def test_every_registered_method_says_what_a_step_computes_and_holds(name: str) -> None:
    (row,) = compare(find_architecture("llama-3.2-1b"), {name: build_method(name)}, "auto", rounds=1)
    assert row["compute"] is not None, "work() is to be declared"
    assert row["compute"] >= 1 or name in CHEAPER
    assert row["compute"] > 0.99 and row["memory"] >= 1


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_a_client_of_a_lower_rank_costs_what_one_of_the_largest_does(name: str) -> None:
    """Arrays have the largest rank, zero beyond a client's own, and nothing but the adapter's step is computed: units
    2N + 3n over 2N + 3n, N + n held, n trained, n entries either way in four bytes, with n at rank 128."""
    n = ADAPTER[LLAVA_3B]
    method = build_method({"name": name, "rank": 128, "ranks": {"phone-*": 16}})
    (row,) = compare(find_architecture(LLAVA_3B), {name: method}, "all", rounds=1)
    assert (row["compute"], row["memory"], row["public_records"]) == (1.0, 1.0, None)
    assert row["trained_parameters"] == n
    assert row["upload_bytes_per_round"] == row["download_bytes_per_round"] == 4 * n


def test_a_search_for_ranks_is_a_step_of_the_adapter_and_of_its_scales() -> None:
    """FedP2EFT trains A and B of rank 32 (n) and 32 scales a module beside them, for 56 modules; the slot of what it
    keeps has as many scales again: 2(N + n + 2 * 1792) + n + 1792."""
    method = build_method({"name": "fedp2eft", "rank_max": 16})
    N, n, scales = 3_212_749_824, 32 * 28 * ((3072 + 3072) + (3072 + 1024)), 56 * 32
    (row,) = compare(find_architecture("llama-3.2-3b"), {"fedp2eft": method}, "auto", rounds=1)
    assert row["backbone_parameters"] == N
    assert row["compute"] == pytest.approx((2 * (N + n + 2 * scales) + n + scales) / (2 * N + 3 * n), abs=1e-12)


@pytest.mark.parametrize(
    ("smallest", "bare", "published"),
    [
        ("llava-llama-3.2-1b", 1_545_617_408, 1.0711),  # 2 n + 0.1 N of the small model, over 2 N + 3 n
        ("llava-qwen2.5-0.5b", 799_262_336, 1.0614),
        (None, 3_528_846_336, 1.0971),  # the client's own model is the smallest
    ],
)
def test_the_pass_of_the_small_model_is_counted_by_its_own_parameters(
    smallest: str | None, bare: int, published: float
) -> None:
    """RELA: a step beside a frozen second adapter, 2N + 5n, and a pass of the frozen small model every ten steps."""
    N, n = 3_528_846_336, ADAPTER[LLAVA_3B]
    method = build_method({"name": "rela", "rank": 128})
    found = None if smallest is None else find_architecture(smallest)
    (row,) = compare(find_architecture(LLAVA_3B), {"rela": method}, "all", rounds=1, smallest=found)
    gates = 28 * 7  # a number at every layer, trained beside n
    assert row["compute"] == pytest.approx((2 * N + 5 * n + gates + 0.1 * bare) / (2 * N + 3 * n), abs=1e-12)
    assert row["compute"] == pytest.approx(published, abs=5e-5)


def test_a_small_model_with_other_names_than_the_targets_is_counted_all_the_same() -> None:
    """Targets are the client's: a small model that has none of them has parameters like any other."""
    method = {"rela": build_method("rela")}
    large, small = find_architecture("llama-3.2-1b"), find_architecture("mbert")
    (row,) = compare(large, method, ["gate_proj"], rounds=1, smallest=small)
    (without,) = compare(large, method, ["gate_proj"], rounds=1)
    assert row["compute"] < without["compute"]
