"""Studies of papers against the settings that the papers have, as far as they are known.

The numbers are those of the papers and their code, written down here a second time, and not of the studies: [P] a
paper says so, [C] its released code does, [D] nobody does, and befit chose. Cells are looked at as they are resolved,
with every default and every change of a run or grid applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.merge.merge import Merge
from befit.runs.provenance import settings_hash
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.plan import Plan, plan_study
from befit.studies.compare.study import read_study

STUDIES = Path(__file__).parents[4] / "studies"
SEEDS = (42, 52, 62)  # [D]; of FedP2EFT its code's [C]


@cache
def planned(name: str, grid: str | None = None) -> Plan:
    """The plan of a study, or of one of its grids alone."""
    if grid is None:
        return make_plan(STUDIES / f"{name}.yaml")
    study = read_study(STUDIES / f"{name}.yaml")
    return plan_study(replace(study, grids={grid: study.grids[grid]}))


def cells(name: str, grid: str | None = None) -> Iterator[tuple[str, Experiment]]:
    """Label and experiment of every cell."""
    for cell in planned(name, grid).cells:
        yield cell.label, cell.experiment


def with_method(name: str, method: str) -> dict[str, Experiment]:
    """The first seed's experiments of one method, by the label of the run."""
    return {run.label: run.cells[0].experiment for run in planned(name).runs if run.method == method}


@dataclass(frozen=True)
class Settings:
    """What every cell of a study has in common."""

    model: str
    rank: int
    alpha: float
    lr: float
    batch_size: int
    dropout: float
    targets: tuple[str, ...]
    schedule: tuple[str, str] = ("constant", "stage")
    cohort: int | None = None  # all clients in every round

    @classmethod
    def of(cls, experiment: Experiment) -> Settings:
        train, adapter, method = experiment.train, experiment.adapter, experiment.method
        return cls(
            experiment.model.id,
            method["rank"],
            method["alpha"],
            train.lr,
            train.batch_size,
            adapter.dropout,
            tuple(adapter.targets or ()),
            (train.schedule, train.schedule_over),
            experiment.federation.cohort,
        )


# Potara (Zou et al. 2026, Table 11), where rank, alpha, optimiser, schedule and seeds are [D].

QKV = ("q_proj", "k_proj", "v_proj")
VIT = Settings("google/vit-base-patch16-224-in21k", 8, 16, 1e-3, 10, 0.1, ("query", "value"))
LLAMA_3B = Settings("meta-llama/Llama-3.2-3B-Instruct", 8, 16, 1e-4, 4, 0.05, QKV)
QWEN_4B = Settings("Qwen/Qwen3-4B-Instruct-2507", 8, 16, 1e-4, 4, 0.05, QKV)


@dataclass(frozen=True)
class Potara:
    """The schedule of one of its benchmarks, in rounds, and the sizes of a client's sets that the paper says."""

    settings: Settings
    steps: int
    local: int  # rounds of Local in the main table
    fedit: int  # rounds of FedIT that Potara merges
    sizes: dict[str, int]


CIFAR = Potara(VIT, 5, 600, 400, {})
COMMONSENSE = Potara(LLAMA_3B, 4, 300, 50, {"train": 1000, "test": 500})
POTARA = {
    "potara/cifar100-10": CIFAR,
    "potara/cifar100-20": CIFAR,
    "potara/cifar100-alpha": CIFAR,
    "potara/commonsense-8": COMMONSENSE,
    "potara/commonsense-16": COMMONSENSE,
    "potara/flan-8": Potara(QWEN_4B, 4, 300, 300, {"train": 2000, "test": 300}),
}
BRANCH = 300  # rounds of Local that are merged, on every benchmark [P]
BASELINES = 600  # rounds of every federated baseline [P]


@pytest.mark.parametrize("name", POTARA)
def test_potara_has_the_settings_of_its_table_in_every_cell(name: str) -> None:
    expected = POTARA[name]
    assert planned(name).seeds == SEEDS
    for label, one in cells(name):
        assert Settings.of(one) == expected.settings, label
        assert (one.train.max_steps, one.train.optimiser, one.train.weight_decay) == (expected.steps, "adamw", 0), label
        assert one.benchmark is not None and one.benchmark.arguments["seed"] == 42, label
        assert expected.sizes.items() <= one.benchmark.arguments.items(), label


@pytest.mark.parametrize("name", POTARA)
def test_potara_merges_its_rounds_alone_with_its_rounds_of_fedit(name: str) -> None:
    """So do its controls, half of each and the weight that is picked on validation examples."""
    found, controls = with_method(name, "potara"), with_method(name, "interpolation")
    assert found and {one.method["w"] for one in controls.values()} == {0.5, "best"}
    for label, one in {**found, **controls}.items():
        method = one.method
        assert (method["rounds_local"], method["rounds_fedit"]) == (BRANCH, POTARA[name].fedit), label
        assert method.get("statistics", {}).get("samples", 30) == 30, label  # [P]


@pytest.mark.parametrize("name", POTARA)
def test_baselines_of_potara_have_their_rounds(name: str) -> None:
    """The rounds of a branch of Potara where a run is called so."""
    others = {"potara", "fisher_merging", "interpolation", "local"}
    for label, one in cells(name):
        if one.method["name"] == "local":
            assert one.method["rounds"] == (BRANCH if "branch" in label else POTARA[name].local), label
        elif one.method["name"] not in others:
            assert one.federation.rounds == (POTARA[name].fedit if "branch" in label else BASELINES), label
            assert one.method.get("rounds_local") is None, label


@pytest.mark.parametrize("name", ["potara/cifar100-10", "potara/cifar100-20"])
def test_fisher_merging_has_the_two_models_of_potara(name: str) -> None:
    """Zou et al. 2026, section 4.2, and the upload of its section 3.5: 471.9 MB are 400 rounds. They are merged in the
    space of the whole updates (appendix H)."""
    for one in with_method(name, "fisher_merging").values():
        assert one.method["space"] == "dense"
        rounds = one.method["rounds_fedit"] or one.federation.rounds
        assert (one.method["rounds_local"], rounds) == (BRANCH, CIFAR.fedit)


# Figures 2a and 2b: t of Potara(t) is [D].
TRADEOFFS = {
    "potara/cifar100-10": ((100, 200, 300, 400, 500, 600), "Potara(400)"),
    "potara/commonsense-8": ((25, 50, 100, 200, 400), "Potara(50)"),
}


@pytest.mark.parametrize("name", TRADEOFFS)
def test_the_trade_off_has_the_runs_of_the_main_table_and_potara_after_other_rounds(name: str) -> None:
    """With equal settings, so that a directory has them once; the cells differ from each other in t alone."""
    rounds, main = TRADEOFFS[name]
    known = {cell.key for cell in planned(name).cells}
    found = with_method(f"{name}-tradeoff", "potara")
    assert [one.method["rounds_fedit"] for one in found.values()] == list(rounds)
    for cell in planned(f"{name}-tradeoff").cells:
        assert (cell.key in known) == (cell.label not in found or cell.label == main), cell.label
    at_main = {settings_hash(replace(one, method={**one.method, "rounds_fedit": 1})) for one in found.values()}
    assert len(at_main) == 1


def test_cifar_is_divided_at_an_alpha_of_a_half_and_swept_over_the_customary_three() -> None:
    """The paper's alpha is lost [D]."""
    for name in ("potara/cifar100-10", "potara/cifar100-20"):
        assert {one.benchmark.arguments["alpha"] for _, one in cells(name) if one.benchmark} == {0.5}
    swept = [one.benchmark.arguments["alpha"] for _, one in cells("potara/cifar100-alpha") if one.benchmark]
    assert sorted(set(swept)) == [0.1, 0.5, 1.0] and len(swept) == 5 * 3 * len(SEEDS)


# From Aggregation to Guidance (Piorczynski et al. 2025), where alpha, dropout, strength and schedule are [D].

GUIDANCE = "aggregation-guidance/sni-10"


def test_guidance_has_the_settings_of_its_protocol_in_every_cell() -> None:
    """500 training records at 32 a step are 16 steps, which is the paper's epoch."""
    expected = Settings("meta-llama/Llama-3.2-1B", 8, 16, 5e-5, 32, 0.05, ("q_proj", "v_proj"))
    assert planned(GUIDANCE).seeds == SEEDS
    for label, one in cells(GUIDANCE):
        assert Settings.of(one) == expected, label
        assert (one.train.max_steps, one.train.optimiser, one.train.weight_decay) == (16, "adamw", 0), label
        assert (one.federation.rounds, one.method.get("rounds")) == (20, None), label
        assert one.benchmark is not None
        assert {"train": 500, "val": 50, "test": 50, "seed": 42}.items() <= one.benchmark.arguments.items(), label
        assert one.method.get("beta", 0.1) == 0.1, label
        assert one.method.get("temperature", 2.0) == 2.0, label


@pytest.mark.parametrize("name", [GUIDANCE, "aggregation-guidance", "aggregation-guidance-validation"])
def test_merges_of_guidance_are_cut_as_by_flexlora_and_both_readings_of_knots_are_there(name: str) -> None:
    """The paper cuts by the decomposition of FlexLoRA, prints M(V) and follows code that merges Sigma V."""
    merges = [Merge(**one.method.get("merge", {})) for _, one in cells(name) if one.method["name"] == "guidance"]
    cut = [merge for merge in merges if merge.space == "knots"]
    assert cut and all((merge.split, merge.iso_mean) == ("B", "kept") for merge in cut)
    assert {("ties", "v"), ("ties", "sigma_v"), ("iso-c", "v"), ("iso-c", "sigma_v")} <= {
        (merge.rule, merge.knots_input) for merge in cut
    }


def test_scales_of_merges_that_are_cut_are_searched_up_to_the_number_of_clients() -> None:
    for knots_input in ("sigma_v", "v"):
        scales = {
            merge.scale
            for _, one in cells("aggregation-guidance-validation")
            if one.method["name"] == "guidance"
            and (merge := Merge(**one.method["merge"])).rule == "iso-c"
            and merge.knots_input == knots_input
            and merge.space == "knots"
        }
        assert max(scales) == 8 and min(scales) < 1


# FedMosaic (Seo et al. 2026, Table 12; snumprlab/fedmosaic).

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VL_1B, VL_3B = "thkim0305/llama3.2_1B_vl", "thkim0305/llama3.2_3B_vl"
COSINE = ("cosine", "round")  # the text says constant, the code of the text-only benchmarks does this [C]
MOSAIC_SEEDS = (1, 2, 3)  # three, of which the code's example is 1
STEPS = {  # of 100 of training alone, as the released code has them [C]
    "local": 100,
    "fedit": 100,
    "feddpa": 50,
    "fedsim": 75,
    "takfl": 75,
    "fedmkt": 60,
    "ditto": 50,
    "perada": 50,
    "feddat": 43,
    "fedmosaic": 94,
    "rela": 94,
}


@dataclass(frozen=True)
class Mosaic:
    """A benchmark: what all models share, the smaller model and the rates, rounds and steps of training alone."""

    settings: Settings
    small: str
    lr_pq: float
    rounds: int
    steps: int
    every: int


VISION = Mosaic(Settings(VL_3B, 128, 256, 2e-5, 4, 0.05, LINEAR), VL_1B, 5e-5, 20, 100, 5)
LLAMA = "meta-llama/Llama-3.{}B"
TEXT = Settings(LLAMA.format("2-3"), 16, 32, 3e-4, 4, 0.05, LINEAR, COSINE)
MOSAIC = {
    **{
        f"fedmosaic/{name}": VISION
        for name in (
            "drake-aligned-factors",
            "drake-assignment",
            "drake-blocks",
            "drake-dynamic",
            "drake-frozen-model",
            "drake-mixing",
            "drake-public",
            "drake-static",
            "hflb-dynamic",
            "hflb-static",
        )
    },
    "fedmosaic/hflb-one-model": replace(VISION, small=""),
    "fedmosaic/fed-aya": Mosaic(TEXT, LLAMA.format("2-1"), 5e-4, 20, 50, 5),
    # The rate is the code's; the text says 3e-4.
    "fedmosaic/fed-llm-large": Mosaic(replace(TEXT, lr=1e-4), LLAMA.format("2-1"), 5e-4, 4, 10, 2),
    **{
        f"fedmosaic/{name}": Mosaic(replace(TEXT, model=LLAMA.format("1-8")), LLAMA.format("2-3"), 5e-4, 20, 30, 5)
        for name in ("fed-scope", "fed-scope-mixing")
    },
}
MIXES = "fedmosaic/drake-mixes"


def check_mosaic(label: str, one: Experiment, expected: Mosaic) -> None:
    """All but the models of an experiment. Steps of other benchmarks are the fraction of 100, halves rounded up."""
    name = one.method["name"]
    assert replace(Settings.of(one), model=expected.settings.model) == expected.settings, label
    assert one.train.max_steps == int(STEPS[name] * expected.steps / 100 + 0.5), label
    assert (one.federation.rounds, one.method.get("rounds"), one.evaluate.every) == (
        expected.rounds,
        None,
        expected.every,
    ), label
    assert one.method.get("weights", "uniform") == "uniform", label
    if name == "fedmosaic":
        assert one.train.lr * one.method["pq_rate"] == pytest.approx(expected.lr_pq, rel=0.01), label
        assert one.method["blocks"] == int(label.rpartition(" · ")[2]) if "blocks" in one.name else 4, label
    if name == "feddpa":  # the two halves of a round's 100 steps
        assert one.method["variant"] == "halves", label


@pytest.mark.parametrize("name", [*MOSAIC, MIXES])
def test_fedmosaic_has_the_settings_of_its_overview_in_every_cell(name: str) -> None:
    expected = MOSAIC.get(name, VISION)
    assert planned(name).seeds == MOSAIC_SEEDS
    for label, one in cells(name):
        check_mosaic(label, one, expected)


@pytest.mark.parametrize("name", MOSAIC)
def test_clients_of_fedmosaic_have_models_of_two_sizes(name: str) -> None:
    expected = MOSAIC[name]
    small = [("small", expected.small)] if expected.small else []
    for label, one in cells(name):
        assert one.model.id == expected.settings.model, label
        assert [(family, entry.model.id) for family, entry in one.families.items()] == small, label


TEN = [f"client-{number:02d}" for number in range(10)]


def models_of(one: Experiment) -> dict[str, int]:
    """How many of DRAKE's ten clients have a model, where families name them."""
    counts: dict[str, int] = {}
    for client in TEN:
        named = (
            family.model.id
            for family in one.families.values()
            if any(fnmatchcase(client, pattern) for pattern in family.clients)
        )
        model = next(named, one.model.id)
        counts[model] = counts.get(model, 0) + 1
    return counts


QWEN_05B, QWEN_15B, QWEN_3B = (f"thkim0305/qwen2.5_{size}B_vl" for size in ("0.5", "1.5", "3"))
VL_8B = "thkim0305/llama3.1_8B_vl"


def test_other_models_of_drake_are_as_many_as_the_paper_says() -> None:
    """Table 14; of three Qwens the counts of the authors' files, two, three and five, and not three, two and five."""
    wanted: list[dict[str, int]] = [
        {VL_3B: 10},
        {VL_1B: 3, VL_3B: 5, VL_8B: 2},
        {QWEN_3B: 10},
        {QWEN_05B: 2, QWEN_15B: 3, QWEN_3B: 5},
        {VL_3B: 6, QWEN_15B: 4},
        {VL_3B: 3, QWEN_15B: 4, QWEN_3B: 3},
        {VL_1B: 2, VL_3B: 5, QWEN_15B: 3},
    ]
    found: dict[str, dict[str, int]] = {}
    for label, one in cells(MIXES):
        mix = models_of(one)
        assert found.setdefault(label.split(" · ")[0].removesuffix(", static"), mix) == mix, label
        if one.method["name"] in ("fedmosaic", "rela"):  # nothing to align between models that are all the same
            assert one.method["name"] == ("rela" if len(mix) == 1 else "fedmosaic"), label
    assert sorted(map(sorted, (one.items() for one in found.values()))) == sorted(
        map(sorted, (one.items() for one in wanted))
    )


def test_three_to_seven_clients_of_drake_are_small_whatever_the_method() -> None:
    by_label = {label: models_of(one) for label, one in cells("fedmosaic/drake-assignment")}
    for label, counts in by_label.items():
        small = int(label.split(" · ")[1])
        assert counts == {VL_1B: small, VL_3B: 10 - small}, label
    assert {label.split(" · ")[1] for label in by_label} == set("34567")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("drake-dynamic", "dynamic"),
        ("drake-static", "static"),
        ("hflb-dynamic", "dynamic"),
        ("hflb-static", "static"),
        ("fed-scope", "static"),
    ],
)
def test_tasks_of_fedmosaic_arrive_as_its_table_says(name: str, kind: str) -> None:
    assert {one.stream.kind for _, one in cells(f"fedmosaic/{name}")} == {kind}


SWEEPS = ("fedmosaic/drake-relevance", "fedmosaic/drake-rounds")  # of rank, or of rounds and steps


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_of_fedmosaic_keeps_its_scale_and_its_steps_in_all(name: str) -> None:
    """alpha is twice the rank; 20 x 94 steps, to half a step a round; the rest is the overview's."""
    for label, one in cells(name):
        steps = 94 if one.method["name"] == "fedmosaic" else 100
        assert one.method["alpha"] == 2 * one.method["rank"], label
        assert abs(one.federation.rounds * one.train.max_steps - 20 * steps) <= one.federation.rounds / 2, label
        assert one.federation.rounds % one.evaluate.every == 0, label
        as_usual = replace(Settings.of(one), rank=128, alpha=256)
        assert as_usual == VISION.settings, label


# FedP2EFT (Lee et al. 2025a; SamsungLabs/fedp2eft).

BUDGETS = (2, 4, 8, 16)
MBERT, MOBILE = "google-bert/bert-base-multilingual-cased", "mtgv/MobileLLaMA-1.4B-Base"
SEARCHING = ("bayestune", "fedp2eft")  # one run serves all budgets


@dataclass(frozen=True)
class Personal:
    """A table: its grid, its model, and a tenth of its clients; steps and batch of a round of a base."""

    grid: str
    model: str
    cohort: int
    steps: int
    batch_size: int
    bases: dict[str, dict[str, Any]]


def base(name: str, rounds: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "rounds": rounds, **more}


FIVE = {
    "Off the shelf": {},
    "Standard FL, all weights": base("fedavg", 100, lr=5e-5),
    "Standard FL, LoRA": base("fedit", 100, rank=16, alpha=32, targets=["query", "value"], lr=5e-5),
    "FedDPA-T": base("feddpa_t", 100, rank=8, alpha=8, targets=["query", "value"], lr=5e-5),
    "DEPT (SPEC)": base("dept", 100, lr=5e-5),
}
P2EFT = {
    "fedp2eft/xnli-600": Personal("bases", MBERT, 30, 8, 32, FIVE),  # two epochs of 100 records
    "fedp2eft/masakhanews-320": Personal(
        "bases", MBERT, 16, 8, 32, {name: of and {**of, "epochs": 2} for name, of in FIVE.items()}
    ),
    "fedp2eft/fedaya-38-mobile": Personal(
        "budgets",
        MOBILE,
        3,
        10,
        16,
        {
            "": base(
                "fedit",
                200,
                rank=16,
                alpha=32,
                targets=["q_proj", "v_proj"],
                lr=2e-5,
                schedule="cosine",
                lr_end=1e-6,
            )
        },
    ),
    "fedp2eft/fedaya-38-llama": Personal("budgets", "meta-llama/Llama-3.2-3B-Instruct", 3, 10, 16, {"": {}}),
}


def base_of(one: Experiment) -> dict[str, Any]:
    """Name, rounds, size, rate and course of the base of an experiment, as far as it says them."""
    block = one.method["base"] or {}
    known = {key: block[key] for key in ("name", "rounds", "epochs", "rank", "alpha", "targets") if key in block}
    return known | {key: block["train"][key] for key in ("lr", "schedule", "lr_end") if key in block.get("train", {})}


@pytest.mark.parametrize("name", P2EFT)
def test_fedp2eft_has_the_settings_of_the_paper_in_every_cell(name: str) -> None:
    expected = P2EFT[name]
    plan = planned(name, expected.grid)
    assert plan.seeds == SEEDS
    for cell in plan.cells:
        label, one = cell.label, cell.experiment
        method = one.method
        assert one.model.id == expected.model, label
        assert one.train.lr == (1e-3 if method["name"] == "adalora" else 1e-4), label
        assert (one.train.batch_size, one.train.max_steps) == (expected.batch_size, expected.steps), label
        assert (one.train.schedule, one.train.grad_clip, one.train.weight_decay) == ("constant", 1.0, 0.0), label
        assert (one.federation.rounds, one.federation.cohort) == (150, expected.cohort), label
        assert method["epochs"] == 2, label
        if expected.model == MBERT:  # as PEFT's all-linear without a task type: 74, the classifier among them
            assert (one.adapter.targets, one.adapter.head) == ("all-linear", True), label
        else:
            assert one.evaluate.wins == ["meteor_nltk", "rouge1", "rougeL"], label
        if method["name"] == "adalora":  # peft's default alpha, and 1.5 r, which is what no value means
            assert (method["alpha"], method["init_rank"]) == (8, None), label
        else:
            assert method["scale"] == 2.0, label  # alpha is twice the rank
        if method["name"] in SEARCHING:  # r_init is twice the largest budget
            wanted = {"lr": 1e-2, "alpha_s": 1e2, "alpha_p": 1e-2, "prior": "simplified", "clip": 1.0}
            assert (method["rank_max"], method["search"]) == (16, wanted), label
        if method["name"] == "fedp2eft":
            assert method["generator"] == {"lr": 1e-4, "steps": 10}, label


@pytest.mark.parametrize("name", P2EFT)
def test_every_method_of_fedp2eft_is_measured_at_all_budgets_on_every_base(name: str) -> None:
    expected = P2EFT[name]
    measured: dict[tuple[str, str], list[int]] = {}
    for run in planned(name, expected.grid).runs:
        method = run.cells[0].experiment.method
        of_base = run.label.split(" · ")[0] if "Off the shelf" in expected.bases else ""
        measured.setdefault((of_base, method["name"]), []).extend([method["rank"], *method.get("budgets", [])])
    methods = ("lora", "adalora", "bayestune", "fedp2eft", "fedl2p")
    head_alone = (0,) * (expected.model == MBERT)  # where there is a head, as LoRA without ranks
    assert {key: tuple(sorted(found)) for key, found in measured.items()} == {
        (of_base, method): (*head_alone * (method == "lora"), *BUDGETS)
        for of_base in expected.bases
        for method in methods
    }


@pytest.mark.parametrize("name", P2EFT)
def test_the_text_of_fedp2eft_and_its_code_stand_side_by_side(name: str) -> None:
    """On Standard FL where there are several bases; everything else is as in the table of budgets."""
    known = {settings_hash(cell.experiment) for cell in planned(name, P2EFT[name].grid).cells}
    found: dict[str, set[str]] = {}
    whole = planned(name)
    presets = {run for table in whole.tables if table.name == "presets" for run in table.runs.values()}
    for cell in (cell for cell in whole.cells if cell.label in presets):
        method = cell.experiment.method
        found.setdefault(method["name"], set()).add(method["preset"])
        as_text = replace(cell.experiment, method={**method, "preset": "recommended"})
        assert settings_hash(as_text) in known, cell.label
    assert found == {name: {"recommended", "parity"} for name in (*SEARCHING, "fedl2p")}


@pytest.mark.parametrize("name", P2EFT)
def test_bases_of_fedp2eft_have_their_rounds_rates_and_sizes(name: str) -> None:
    expected = P2EFT[name]
    for cell in planned(name, expected.grid).cells:
        of_base = cell.label.split(" · ")[0] if "Off the shelf" in expected.bases else ""
        found = base_of(cell.experiment)
        assert found == expected.bases[of_base], cell.label
        if expected.bases[of_base].get("name") in ("fedavg", "dept"):  # all weights at the rate itself
            assert cell.experiment.method["base"]["lr_scale"] == 1.0, cell.label


@pytest.mark.parametrize("name", P2EFT)
def test_lora_at_other_rates_differs_from_lora_in_its_rate_alone(name: str) -> None:
    """At the first rate its cells are those of the paper's table, so that one directory has them once."""
    known = {
        settings_hash(cell.experiment)
        for cell in planned(name, P2EFT[name].grid).cells
        if cell.experiment.method["name"] == "lora"
    }
    swept = planned(f"{name}-rates").cells
    rates = sorted({cell.experiment.train.lr for cell in swept})
    assert rates[0] == 1e-4 and rates[-1] >= 10 * rates[0]
    for cell in swept:
        at_first = replace(cell.experiment, train=replace(cell.experiment.train, lr=rates[0]))
        assert settings_hash(at_first) in known, cell.label


def test_no_study_of_a_paper_is_left_out() -> None:
    there = {
        path.relative_to(STUDIES).with_suffix("").as_posix()
        for path in STUDIES.glob("*/*.yaml")
        if path.parent.name not in ("again", "choice", "claims", "fedlora", "offline", "privacy", "why")
    }
    assert there == {
        *POTARA,
        *(f"{name}-tradeoff" for name in TRADEOFFS),
        GUIDANCE,
        *MOSAIC,
        MIXES,
        *SWEEPS,
        *P2EFT,
        *(f"{name}-rates" for name in P2EFT),
    }


@pytest.mark.parametrize("name", [path.stem for path in sorted((STUDIES / "again").glob("*.yaml"))])
def test_a_study_is_done_again_with_the_same_settings_and_new_seeds(name: str) -> None:
    study = f"claims/{name.partition('-')[0]}"
    first = planned(study if (STUDIES / f"{study}.yaml").exists() else f"offline/{name}")
    again = planned(f"again/{name}")
    chosen = first.chosen.seeds if first.chosen else ()
    assert not {*first.seeds, *chosen, *range(100, 110)} & set(again.seeds)
    assert again.claims == {claim: first.claims[claim] for claim in again.claims}
    same_seed = make_plan(STUDIES / f"again/{name}.yaml", seeds=first.seeds[:1])
    before = {run.label: run.cells[0].experiment for run in first.runs}
    assert same_seed.runs
    for run in same_seed.runs:
        earlier, now = before[run.label], run.cells[0].experiment
        if not any(claim.of == "others" for claim in again.claims.values()):  # nothing is said of these scores then
            now = replace(now, evaluate=replace(now.evaluate, others=earlier.evaluate.others))
        if not again.claims:  # of the scores at the end alone
            when = {"every": earlier.evaluate.every, "newcomers": earlier.evaluate.newcomers}
            now = replace(now, evaluate=replace(now.evaluate, **when))
        assert settings_hash(now) == settings_hash(earlier), run.label
