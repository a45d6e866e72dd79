"""Who asks what, with which model, for how long, in FedMosaic (Seo et al. 2026, Tables 9 and 12 to 19 and 31), as in
its tables and in the scenario files of snumprlab/fedmosaic; and the paper's compute and memory by its own count.

Clients of DRAKE and HFLB have a number in the paper, p, and one in the scenario files, j, which befit's ids have.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from befit.cost.architecture import find_architecture
from befit.data.papers.fedscope import CLIENTS, IDS
from befit.data.papers.large import AYA_SMALL, FIELDS, large_tasks
from befit.data.papers.scenarios import DRAKE, DRAKE_NEWCOMERS, HFLB, SMALL, Scenario
from befit.data.registry import get
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.plan import Plan

STUDIES = Path(__file__).parents[2] / "studies" / "fedmosaic"
# p: j, and the tasks in the order of their stream (Table 13).
DRAKE_OF_PAPER = {
    1: (0, ["Fashion200K-0", "MagicBrush-0", "VISION-0", "FashionIQ-0"]),
    2: (6, ["WCVQA-0", "iconqa-2", "Co-Instruct-DB-2", "SEED-Bench-2-1"]),
    3: (8, ["Co-Instruct-DB-0", "dvqa-0", "WCVQA-1", "iconqa-3"]),
    4: (9, ["iconqa-0", "Co-Instruct-DB-3", "SEED-Bench-2-0", "WCVQA-2"]),
    5: (1, ["VSR-0", "VISION-1", "Fashion200K-2", "NLVR2-0"]),
    6: (2, ["SEED-Bench-2-2", "Fashion200K-1", "NLVR2-1", "CIRR-0"]),
    7: (3, ["VizWiz-0", "IRFL-2", "Bongard-HOI-1", "MIT-States-0"]),
    8: (4, ["IRFL-1", "Bongard-OpenWorld-1", "COMICS_Dialogue-0", "IRFL-0"]),
    9: (5, ["Bongard-HOI-2", "Bongard-OpenWorld-0", "IRFL-3", "Bongard-HOI-0"]),
    10: (7, ["TQA-0", "WCVQA-3", "iconqa-1", "Co-Instruct-DB-1"]),
}
HFLB_OF_PAPER = {
    1: (2, [f"GQA-{number}" for number in range(30, 34)]),
    2: (0, [f"GQA-{number}" for number in range(10, 14)]),
    3: (1, [f"GQA-{number}" for number in range(20, 24)]),
    4: (3, [f"Abstract-{number}" for number in range(4)]),
    5: (4, [f"SNLI-VE-{number}" for number in range(4)]),
    6: (5, [f"COCOQA-{number}" for number in range(4)]),
    7: (6, [f"NLVR2_feddat-{number}" for number in range(4)]),
    8: (7, [f"VizWiz-Original-{number}" for number in range(4)]),
    9: (8, [f"AQUA-{number}" for number in range(4)]),
}
UNSEEN = {
    "DreamSim-0",
    "imagecode-0",
    "RecipeQA_ImageCoherence-0",
    "RecipeQA_VisualCloze-0",
    "HQ_Edit-0",
    "Mantis_contrastive_caption-0",
    "Mantis_contrastive_caption-1",
}


@pytest.mark.parametrize(
    ("name", "clients", "paper"), [("drake", DRAKE, DRAKE_OF_PAPER), ("hflb", HFLB, HFLB_OF_PAPER)]
)
def test_tasks_and_sizes_are_those_of_the_paper_and_of_the_files(
    name: str, clients: tuple[Scenario, ...], paper: dict[int, tuple[int, list[str]]]
) -> None:
    """Table 13; the paper's small models are clients 1 to 4 of DRAKE and 1 to 3 of HFLB (Table 14)."""
    assert len(clients) == len(paper) == {"drake": 10, "hflb": 9}[name]
    for j, tasks in paper.values():
        assert [part.name for part in clients[j].parts] == tasks
    small = {"drake": 4, "hflb": 3}[name]
    assert SMALL[name]["paper"] == {paper[p][0] for p in range(1, small + 1)}
    assert len(SMALL[name]["scenario"]) == small
    assert SMALL["drake"]["scenario"] == {0, 1, 8, 9} and SMALL["hflb"]["scenario"] == {0, 1, 5}
    assert {part.name for part in DRAKE_NEWCOMERS} == UNSEEN


def test_drake_has_12_relation_12_reasoning_and_16_question_tasks() -> None:
    """Clients 1, 5, 6; 7, 8, 9; 2, 3, 4, 10 of the paper."""
    groups = {"relation": (1, 5, 6), "reasoning": (7, 8, 9), "vqa": (2, 3, 4, 10)}
    counts = {name: sum(len(DRAKE_OF_PAPER[p][1]) for p in members) for name, members in groups.items()}
    assert counts == {"relation": 12, "reasoning": 12, "vqa": 16}
    assert [part.name for one in DRAKE for part in one.parts if part.open] == ["iconqa-2", "iconqa-3"]


def test_text_clients_are_those_of_the_files() -> None:
    """Fed-Scope 5 x 4 (two large), Fed-Aya 8 x 4 (four small), Fed-LLM-Large 52 x 2 (26 of each size)."""
    assert [size for size, _ in CLIENTS] == ["large", "small", "small", "small", "large"]
    assert list(IDS) == [
        (0, 1, 2, 3),
        (10, 11, 12, 13),
        (14, 15, 16, 17),
        (20, 21, 22, 23),
        (24, 25, 26, 27),
    ]
    assert set(AYA_SMALL) == {2, 4, 6, 7} and len(FIELDS) == 8
    for j in range(52):
        names = [part.name for part in large_tasks(j)]
        if j < 16:
            expected = [f"FedDPA-{half}{j // 2}{1 + j % 2}" for half in (1, 2)]
        elif j < 32:
            first = 100 + 10 * ((j - 16) // 2) + 2 * (j % 2)
            expected = [f"Fed-aya_topic-{first}", f"Fed-aya_topic-{first + 1}"]
        else:
            expected = [f"FedchatbotIT-{j - 32}", f"FedchatbotIT-{j - 12}"]
        assert names == expected


@cache
def planned(name: str) -> Plan:
    return make_plan(STUDIES / f"{name}.yaml")


# Table 12: rounds, steps of SFT, batch, rate of A and B and of P and Q, rank, alpha. Fed-LLM-Large as in the code.
TABLE_12: dict[str, tuple[Any, ...]] = {
    "drake-dynamic": (20, 100, 4, 2e-5, 5e-5, 128, 256),
    "drake-static": (20, 100, 4, 2e-5, 5e-5, 128, 256),
    "hflb-dynamic": (20, 100, 4, 2e-5, 5e-5, 128, 256),
    "hflb-static": (20, 100, 4, 2e-5, 5e-5, 128, 256),
    "fed-scope": (20, 30, 4, 3e-4, 5e-4, 16, 32),
    "fed-aya": (20, 50, 4, 3e-4, 5e-4, 16, 32),
    "fed-llm-large": (4, 10, 4, 1e-4, 5e-4, 16, 32),
}
# Steps of each method on DRAKE and HFLB, of 100 (released code); in text-only runs 30, 50 and 10 parts of a hundred.
STEPS = {
    **dict.fromkeys(("local", "fedit"), 100),
    **dict.fromkeys(("ditto", "perada", "feddpa"), 50),
    **dict.fromkeys(("fedsim", "takfl"), 75),
    "fedmkt": 60,
    "feddat": 43,
    "fedmosaic": 94,
}


@pytest.mark.parametrize("name", TABLE_12)
def test_a_study_trains_as_table_12_says_and_every_method_for_its_share(name: str) -> None:
    rounds, steps, batch, rate, pq_rate, rank, alpha = TABLE_12[name]
    runs = {run.method: run.cells[0].experiment for run in planned(name).runs}
    assert runs.keys() == STEPS.keys()
    for method, found in runs.items():
        train = found.train
        assert (found.federation.rounds, train.batch_size, train.lr) == (rounds, batch, rate), method
        assert (found.method["rank"], found.method["alpha"]) == (rank, alpha)
        assert train.max_steps == pytest.approx(STEPS[method] * steps / 100, abs=0.501), method
        assert found.adapter.dropout == 0.05
    pq = runs["fedmosaic"].method.get("pq_rate", 2.5)
    assert pq * rate == pytest.approx(pq_rate, rel=0.01)
    assert [cell.seed for cell in planned(name).runs[0].cells] == [1, 2, 3]


def models_of(name: str, label: str) -> dict[str, set[int]]:
    """By model's last name, the clients that have it in a run of a study; the others have that named ''."""
    (run,) = [one for one in planned(name).runs if one.label == label]
    found = run.cells[0].experiment
    return {
        family.model.id.rpartition("/")[2]: {int(client.rpartition("-")[2]) for client in family.clients}
        for family in found.families.values()
    } | {"": {found.model.id.rpartition("/")[2]}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("Llama 3B", {"": {"llama3.2_3B_vl"}}),
        ("Qwen 3B", {"": {"qwen2.5_3B_vl"}}),
        (
            "Llama 1B, 3B, 8B (3, 5, 2)",
            {"llama3.2_1B_vl": {0, 1, 8}, "llama3.1_8B_vl": {6, 9}, "": {"llama3.2_3B_vl"}},
        ),
        (
            "Qwen 0.5B, 1.5B, 3B (2, 3, 5)",
            {"qwen2.5_0.5B_vl": {1, 8}, "qwen2.5_1.5B_vl": {0, 5, 6}, "": {"qwen2.5_3B_vl"}},
        ),
        ("Llama 3B, Qwen 1.5B (6, 4)", {"qwen2.5_1.5B_vl": {0, 1, 2, 4}, "": {"llama3.2_3B_vl"}}),
        (
            "Llama 3B, Qwen 1.5B, Qwen 3B (3, 4, 3)",
            {"qwen2.5_1.5B_vl": {0, 1, 2, 4}, "qwen2.5_3B_vl": {3, 5, 7}, "": {"llama3.2_3B_vl"}},
        ),
        (
            "Llama 1B, Llama 3B, Qwen 1.5B (2, 5, 3)",
            {"llama3.2_1B_vl": {1, 8}, "qwen2.5_1.5B_vl": {0, 2, 4}, "": {"llama3.2_3B_vl"}},
        ),
    ],
)
def test_clients_have_the_models_of_the_scenario_files(mix: str, expected: dict[str, set[Any]]) -> None:
    """Tables 4, 14 and 16 to 19."""
    assert models_of("drake-mixes", f"{mix} · SFT") == models_of("drake-mixes", f"{mix} · FedMosaic") == expected


def test_table_9_has_three_to_seven_small_clients() -> None:
    for count in "34567":
        found = models_of("drake-assignment", f"FedMosaic · {count}")
        assert len(found["llama3.2_1B_vl"]) == int(count) and found[""] == {"llama3.2_3B_vl"}


def test_table_31_compares_with_a_qwen_in_16_8_and_4_bits() -> None:
    found = [run.cells[0].experiment.common_model for run in planned("drake-frozen-model").runs[1:]]
    assert found[0] is None
    assert [(one.id.rpartition("/")[2], one.quantise) for one in found if one] == [
        ("qwen2.5_0.5B_vl", kind) for kind in ("none", "int8", "nf4")
    ]


def test_text_models_are_base_models() -> None:
    """Appendix A.6 and the scenario files."""
    ids = [get(name).default_model for name in ("fedaya-8", "fedscope-5", "fed-llm-large-52")]
    ids += [one for name in ("fedaya-8", "fedscope-5", "fed-llm-large-52") for one in get(name).families.values()]
    for name in ("fed-aya", "fed-scope", "fed-scope-mixing", "fed-llm-large"):
        found = planned(name).runs[0].cells[0].experiment
        ids += [found.model.id, *(family.model.id for family in found.families.values())]
        assert {found.model.prompt, *(family.model.prompt for family in found.families.values())} == {"plain"}
    assert {*ids} == {"meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"}


# Table 15, by the paper's count: a parameter met by a token is 1. N of the LLaVA with Llama 3B, n of an adapter.
N_BLOCKS, RANK = 4, 128


@cache
def parameters(model: str) -> int:
    return sum(one.numel() for one in find_architecture(model).skeleton().parameters())


def table_15() -> tuple[int, int]:
    return parameters("llava-llama-3.2-3b"), RANK * 28 * (2 * (3072 + 3072) + 2 * (3072 + 1024) + 3 * (3072 + 8192))


@pytest.mark.parametrize(
    ("method", "compute", "memory"),
    [
        ("SFT, FedIT", 1.000, 1.000),
        ("Ditto", 2.000, 1.052),
        ("FedSim", 1.487, 1.052),
        ("FedDPA", 2.051, 1.052),
        ("FedDAT", 2.564, 1.104),
    ],
)
def test_what_the_paper_counts_of_a_step(method: str, compute: float, memory: float) -> None:
    """Forward N + n, backward N + n for activations and n for the adapter. FedSim's is one backward pass for two
    forward ones, FedDAT's one teacher's pass; docs/methods/fedmosaic.md has what befit counts beside it."""
    N, n = table_15()
    assert (N, n) == (3_528_846_336, 194_510_848)
    plain, forward = 2 * N + 3 * n, N + n
    counted, adapters = {
        "SFT, FedIT": (plain, 1),
        "Ditto": (2 * plain, 2),
        "FedSim": (plain + forward, 2),
        "FedDPA": (2 * plain + 2 * n, 2),
        "FedDAT": ((N + 2 * n) + plain + (2 * N + 5 * n), 3),
    }[method]
    assert round(counted / plain, 3) == compute
    assert (N + adapters * n) / (N + n) == pytest.approx(memory, abs=6e-4)


def test_what_the_paper_counts_of_fedmosaic() -> None:
    """1.098 is a step beside a frozen adapter and twenty passes of the 1B model and its vocabulary in a hundred steps;
    1.053 counts A and B of the PQ blocks twice, their cores, and two gate vectors for each module."""
    N, n = table_15()
    small, vocabulary = parameters("llava-llama-3.2-1b"), 128_256 * 2048
    assert (2 * N + 5 * n + 0.2 * (small + vocabulary)) / (2 * N + 3 * n) == pytest.approx(1.098, abs=5e-4)
    cores = 2 * 7 * N_BLOCKS * (RANK**2 + RANK)
    gates = 2 * 28 * (4 * 3072 + 2 * 3072 + 8192)
    assert (N + 2 * n + cores + gates) / (N + n) == pytest.approx(1.053, abs=5e-4)


@pytest.mark.parametrize(
    ("model", "whole", "adapter"),
    [
        ("llava-llama-3.2-1b", 1_545_617_408, 90_177_536),
        ("llava-llama-3.2-3b", 3_528_846_336, 194_510_848),
        ("llava-qwen2.5-0.5b", 799_262_336, 70_385_664),
    ],
)
def test_parameters_of_the_models_and_of_their_adapters(model: str, whole: int, adapter: int) -> None:
    text = find_architecture(model).config.text_config
    d, f, L = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    kv = d * text.num_key_value_heads // text.num_attention_heads
    assert parameters(model) == whole
    assert RANK * L * (4 * d + 2 * (d + kv) + 3 * (d + f)) == adapter
