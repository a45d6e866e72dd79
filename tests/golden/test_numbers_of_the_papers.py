"""The papers' numbers that follow from shapes, formulas and published lists, each computed by befit.

Every one is a row of a table of numbers in docs/fidelity.md, by its label: the paper's number as printed ("-": it is
not), ours, and the difference. What is printed stands here a second time; a row that is on one of the two pages alone
fails. Where a list is compared, the list itself is in `test_tasks_of_the_papers.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import pytest
from torch import nn

from befit.adapters.pq import placement
from befit.cost.architecture import find_architecture
from befit.cost.arguments import chosen_methods
from befit.cost.compare import compare
from befit.data.papers.commonsense_tasks import TASKS as COMMONSENSE
from befit.data.papers.fedaya import CLIENTS, NEWCOMERS
from befit.data.papers.flan import TASKS as FLAN
from befit.data.papers.masakhanews import LANGUAGES as NEWS_LANGUAGES
from befit.data.papers.masakhanews import masakhanews_320
from befit.data.papers.scenarios import DRAKE, DRAKE_NEWCOMERS, HFLB, SMALL
from befit.data.papers.xnli import LANGUAGES as XNLI_LANGUAGES
from befit.data.papers.xnli import xnli_600
from befit.methods.adalora import AdaLora
from befit.studies.compare.comparison import make_plan
from befit.studies.select import model_choice
from tests.golden.fidelity import NUMBERS, ROOT, Row, difference, rows
from tests.golden.test_communication_of_fedmosaic import LARGE, gradient, net, other_small_model, perada, row, saved
from tests.golden.test_communication_table import rows as potara_costs

Number = tuple[str, Callable[[], str]]  # as printed in the paper, and befit's


def entries(model: str, factor: str) -> Callable[[], str]:
    return lambda: f"{potara_costs(model)['fedit']['parameters'][factor]:,}"


def megabytes(model: str, method: str) -> Callable[[], str]:
    """Of a client in one round."""
    return lambda: f"{potara_costs(model)[method]['upload_bytes_per_round'] / 1e6:.3f} MB"


def total(model: str, method: str) -> Callable[[], str]:
    return lambda: f"{potara_costs(model)[method]['upload_bytes_total'] / 1e6:,.1f} MB"


def saving(model: str) -> Callable[[], str]:
    return lambda: f"{100 * potara_costs(model)['potara']['upload_saving']:.1f} %"


VIT, LLAMA, QWEN = "vit-b-16", "llama-3.2-3b", "qwen3-4b"
POTARA: dict[str, Number] = {
    "entries of A, ViT-B/16": ("147,456", entries(VIT, "A")),
    "entries of B, ViT-B/16": ("147,456", entries(VIT, "B")),
    "entries of A, Llama-3.2-3B": ("2,064,384", entries(LLAMA, "A")),
    "entries of B, Llama-3.2-3B": ("1,146,880", entries(LLAMA, "B")),
    "entries of A, Qwen3-4B": ("2,211,840", entries(QWEN, "A")),
    "entries of B, Qwen3-4B": ("1,769,472", entries(QWEN, "B")),
    "A or B in a round, ViT-B/16": ("0.59 MB", megabytes(VIT, "fedsa")),
    "A in a round, Llama-3.2-3B": ("8.26 MB", megabytes(LLAMA, "fedsa")),
    "B in a round, Llama-3.2-3B": ("4.59 MB", megabytes(LLAMA, "ffa_lora")),
    "saving against FedIT, CIFAR-100": ("33.3 %", saving(VIT)),
    "saving against FedIT, commonsense": ("-", saving(LLAMA)),
    "saving against FedIT, FLAN": ("-", saving(QWEN)),
    "FedIT, FedDPA or FedALT in 600 rounds, CIFAR-100": ("-", total(VIT, "fedit")),
    "FedIT, FedDPA or FedALT in 600 rounds, commonsense": ("-", total(LLAMA, "fedit")),
    "FedIT, FedDPA or FedALT in 600 rounds, FLAN": ("-", total(QWEN, "fedit")),
    "FedSA-LoRA in 600 rounds, CIFAR-100": ("-", total(VIT, "fedsa")),
    "FedSA-LoRA in 600 rounds, commonsense": ("-", total(LLAMA, "fedsa")),
    "FFA-LoRA in 600 rounds, commonsense": ("-", total(LLAMA, "ffa_lora")),
    "Potara or Fisher merging, CIFAR-100": ("-", total(VIT, "potara")),
    "Potara, commonsense": ("-", total(LLAMA, "potara")),
    "Potara, FLAN": ("-", total(QWEN, "potara")),
    "commonsense data sets, one a client": ("8", lambda: str(len(COMMONSENSE))),
    "FLAN tasks, one a client": ("8", lambda: str(len(FLAN))),
}


@cache
def guided() -> dict[str, Any]:
    """What `befit cost` finds for guidance with the paper's backbone and adapters."""
    ((_, method),) = chosen_methods(["guidance"], ["rank=8"]).values()
    (found,) = compare(find_architecture("llama-3.2-1b"), {"guidance": method}, ("q_proj", "v_proj"), rounds=20)
    return found


def epoch() -> str:
    """Of the study, from its records and the size of its batches; the steps that it trains for are as many."""
    one = make_plan(ROOT / "studies" / "aggregation-guidance" / "sni-10.yaml").cells[0].experiment
    assert one.benchmark is not None
    steps = -(-one.benchmark.arguments["train"] // one.train.batch_size)
    assert one.train.max_steps == steps
    return str(steps)


GUIDANCE: dict[str, Number] = {
    "steps of an epoch of 500 records, 32 a step": ("16", epoch),
    "entries of A, Llama-3.2-1B": ("-", lambda: f"{guided()['parameters']['A']:,}"),
    "entries of B, Llama-3.2-1B": ("-", lambda: f"{guided()['parameters']['B']:,}"),
    "upload of a client in a round": ("-", lambda: f"{guided()['upload_bytes_per_round'] / 1e6:.2f} MB"),
    "upload of a client in 20 rounds": ("-", lambda: f"{guided()['upload_bytes_total'] / 1e6:.1f} MB"),
}

TABLE_8 = {  # gains of the larger model in points, in the paper's order of clients
    "DRAKE": (0.90, 1.03, 1.70, 0.80, 2.85, 12.80, 15.84, 16.53, 10.01, 6.37),
    "HFLB": (0.55, -0.86, 1.62, 1.12, 2.26, 2.27, 2.83, 3.05, 2.05),
}


def sizes(chosen: Mapping[str, str]) -> str:
    counts = Counter(chosen.values())
    return f"{counts['small']} small, {counts['large']} large"


def choice(benchmark: str) -> Callable[[], str]:
    return lambda: sizes(model_choice({str(client): gain for client, gain in enumerate(TABLE_8[benchmark])}, 2.0))


def assigned(benchmark: str, clients: int) -> Callable[[], str]:
    small = SMALL[benchmark]["paper"]
    return lambda: sizes({str(client): "small" if client in small else "large" for client in range(clients)})


def places(blocks: int) -> Callable[[], str]:
    """The blocks, from 1 as the equation counts them."""
    return lambda: ", ".join(str(place + 1) for place in placement(4, blocks))


def cost(method: str, key: str, *settings: str) -> Callable[[], str]:
    return lambda: f"{row(LARGE, method, *settings)[key]:.3f}"


def percent(found: Callable[[], float]) -> Callable[[], str]:
    return lambda: f"{found():.2f} %"


def unknown() -> str:
    return "-"


FEDMOSAIC: dict[str, Number] = {
    "gradient, whole, over the adapter of a 3B client": (
        "8.6 %",
        percent(lambda: gradient(LARGE, "relevance.share=1.0")),
    ),
    "gradient, 40 % of its entries": ("3.4 %", percent(lambda: gradient(LARGE))),
    "gradient, 40 % of its rows, rounded down": (
        "3.4 %",
        lambda: f"{gradient(LARGE, 'fedmosaic.relevance.mask=rows'):.3f} %",
    ),
    "saved by PQ-LoRA": ("14.3 %", percent(lambda: saved(LARGE))),
    "saved in all": ("10.9 %", percent(lambda: net(LARGE))),
    "places of N_B = 4 among 16 blocks": ("4, 8, 12, 16", places(16)),
    "places of N_B = 4 among 24 blocks": ("6, 12, 18, 24", places(24)),
    "places of N_B = 4 among 28 blocks": ("7, 14, 21, 28", places(28)),
    "places of N_B = 4 among 32 blocks": ("8, 16, 24, 32", places(32)),
    "places of N_B = 4 among 36 blocks": ("9, 18, 27, 36", places(36)),
    "compute, SFT": ("1.000", cost("local", "compute")),
    "compute, FedIT": ("1.000", cost("fedit", "compute")),
    "compute, Ditto": ("2.000", cost("ditto", "compute")),
    "compute, FedSim": ("1.487", cost("fedsim", "compute")),
    "compute, FedDPA": ("2.051", cost("feddpa", "compute", "variant=halves")),
    "compute, FedDAT": ("2.564", cost("feddat", "compute")),
    "compute, PerAda": ("2.294", lambda: f"{perada():.3f}"),
    "compute, TAKFL": ("1.294", unknown),
    "compute, FedMKT": ("1.574", unknown),
    "compute, FedMosaic": ("1.098", cost("fedmosaic", "compute")),
    "memory, SFT, FedIT, TAKFL": ("1.000", cost("local", "memory")),
    "memory, Ditto, FedSim, FedDPA, PerAda": ("1.052", cost("ditto", "memory")),
    "memory, FedDAT": ("1.104", cost("feddat", "memory")),
    "memory, FedMKT": ("1.002", unknown),
    "memory, FedMosaic": ("1.053", cost("fedmosaic", "memory")),
    "small model Qwen-0.5B, 16 bits": ("0.52", lambda: f"{other_small_model(16):.3f}"),
    "small model Qwen-0.5B, 8 bits": ("0.26", lambda: f"{other_small_model(8):.3f}"),
    "small model Qwen-0.5B, 4 bits": ("0.13", lambda: f"{other_small_model(4):.3f}"),
    "tasks of DRAKE's clients": ("40", lambda: str(len({part.name for one in DRAKE for part in one.parts}))),
    "tasks of DRAKE that no client has": ("7", lambda: str(len(DRAKE_NEWCOMERS))),
    "tasks of HFLB's clients": ("36", lambda: str(len({part.name for one in HFLB for part in one.parts}))),
    "models of DRAKE's clients": ("4 small, 6 large", assigned("drake", 10)),
    "models of HFLB's clients": ("3 small, 6 large", assigned("hflb", 9)),
    "models that the gains choose, DRAKE": ("4 small, 6 large", choice("DRAKE")),
    "models that the gains choose, HFLB": ("3 small, 6 large", choice("HFLB")),
}


@cache
def personal(model: str, method: str) -> dict[str, Any]:
    """What `befit cost --targets all-linear` finds, with a classifier of three classes where there is one."""
    architecture = find_architecture(model)
    labels = 3 if architecture.task.endswith("classification") else None
    ((_, built),) = chosen_methods([method]).values()
    (found,) = compare(architecture, {method: built}, "all-linear", rounds=150, labels=labels)
    return found


def network(model: str, method: str, part: str) -> Callable[[], str]:
    """Entries of what is federated, as a share of the backbone."""

    def share() -> str:
        found = personal(model, method)
        return f"{100 * found['slots'][part]['total'] / found['backbone_parameters']:.4f} %"

    return share


def linear_modules(model: str) -> Callable[[], str]:
    """M: every linear module of the bare model, whose inputs are features."""
    return lambda: str(sum(isinstance(one, nn.Linear) for one in find_architecture(model).skeleton(3).modules()))


def adapted(model: str) -> Callable[[], str]:
    return lambda: str(personal(model, "fedp2eft")["adapted_modules"])


def clients(benchmark: Callable[..., Any], languages: int) -> Callable[[], str]:
    """Of both pools, at the benchmark's own number of clients for each language and pool."""
    return lambda: str(2 * languages * signature(benchmark).parameters["clients"].default)


FEDP2EFT: dict[str, Number] = {
    "generator over mBERT": ("0.2 %", network("mbert", "fedp2eft", "generator")),
    "generator over Llama-3.2-3B": ("0.16 %", network("llama-3.2-3b", "fedp2eft", "generator")),
    "FedL2P's network over mBERT": ("0.02 %", network("mbert", "fedl2p", "rates")),
    "FedL2P's network over Llama-3.2-3B": ("0.002 %", network("llama-3.2-3b", "fedl2p", "rates")),
    "target modules L, mBERT": ("-", adapted("mbert")),
    "target modules L, Llama-3.2-3B": ("-", adapted("llama-3.2-3b")),
    "target modules L, MobileLLaMA-1.4B": ("-", adapted("mobilellama-1.4b")),
    "linear modules M, mBERT": ("-", linear_modules("mbert")),
    "linear modules M, Llama-3.2-3B": ("-", linear_modules("llama-3.2-3b")),
    "linear modules M, MobileLLaMA-1.4B": ("-", linear_modules("mobilellama-1.4b")),
    "scales of a module at the start": (
        "32",
        lambda: str(personal("mbert", "fedp2eft")["slots"]["budgeted"]["lambda"] // 74),
    ),
    "AdaLoRA's ranks at the start, r = 2, 4, 8, 16": (
        "3, 6, 12, 24",
        lambda: ", ".join(str(AdaLora(rank=rank).start) for rank in (2, 4, 8, 16)),
    ),
    "clients of XNLI, of both pools": ("600", clients(xnli_600, len(XNLI_LANGUAGES))),
    "clients of MasakhaNEWS, of both pools": ("320", clients(masakhanews_320, len(NEWS_LANGUAGES))),
    "clients of Fed-Aya, seen and unseen": ("30 + 8", lambda: f"{CLIENTS - len(NEWCOMERS)} + {len(NEWCOMERS)}"),
}

PAPERS = {
    "Potara": POTARA,
    "From Aggregation to Guidance": GUIDANCE,
    "FedMosaic": FEDMOSAIC,
    "FedP2EFT": FEDP2EFT,
}


def check(row: Row) -> None:
    printed, found = PAPERS[row.paper][row.name]
    paper, ours = row.cells["paper"], row.cells["ours"]
    assert (paper, ours) == (printed, found())
    if ours == "-":
        assert row.cells["difference"].startswith("does not follow: ")
    elif row.name == "models that the gains choose, HFLB":
        assert row.cells["difference"].startswith("two clients")
    else:
        assert row.cells["difference"] == difference(paper, ours)


def of(paper: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "row", [one for one in rows(NUMBERS) if one.paper == paper], ids=lambda one: one.name
    )


@of("Potara")
def test_numbers_of_potara(row: Row) -> None:
    check(row)


@of("From Aggregation to Guidance")
def test_numbers_of_guidance(row: Row) -> None:
    check(row)


@of("FedMosaic")
def test_numbers_of_fedmosaic(row: Row) -> None:
    check(row)


@of("FedP2EFT")
def test_numbers_of_fedp2eft(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_has_every_number_once_and_no_other(paper: str) -> None:
    assert [one.name for one in rows(NUMBERS) if one.paper == paper] == list(PAPERS[paper])
