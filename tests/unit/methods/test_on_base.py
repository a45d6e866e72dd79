"""Whoever personalises a base looks, searches and trains on top of it in every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import join
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.storage import read_lines
from befit.core.wire import from_bytes
from befit.methods.adalora import AdaLora
from befit.methods.bayestune import BayesTune
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.lora import Lora
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.runs.runner import check, run
from tests.backbones import short_vit
from tests.federation import Clients
from tests.tiny import assert_near

BASE = {"name": "fedit", "rank": 2}
# Nobody has to choose: with ranks to drop, the rounding of a merge could decide which.
WAYS: dict[str, tuple[Callable[..., Method], dict[str, Any]]] = {
    "fedp2eft": (FedP2EFT, {"rank": 4, "rank_max": 2}),
    "bayestune": (BayesTune, {"rank": 4, "rank_max": 2}),
    "lora": (Lora, {"rank": 2}),
    "adalora": (AdaLora, {"rank": 2, "init_rank": 2}),
}


def merge_base(clients: Clients, into: Clients) -> None:
    """Add `scale B A` of what the clients fixed to the dense weights of another federation's backbone."""
    fixed, scale = clients.memory("a").part("fixed").arrays, clients.model.layout.slot("shared").scale
    for name, layer in into.model.layers.items():
        A, B = (fixed[join("shared", name, factor)] for factor in ("A", "B"))
        assert float(B.abs().max()) > 0.01  # a base that says something
        with torch.no_grad():
            layer.weight.add_(scale * B @ A)


def personal_reports(clients: Clients) -> dict[tuple[str, int, str], dict[str, float]]:
    """What clients reported of their own stages, those of the base left out."""
    own = ("generate", "scales", "search", "budget")
    return {(at.stage, at.round, u.client.id): u.report for at, u in clients.journal.updates if at.stage in own}


@pytest.mark.parametrize("way", WAYS)
def test_personalising_a_base_is_personalising_a_backbone_into_which_it_is_merged(way: str) -> None:
    """Features, scales, generator, losses and adapters of all rounds, within what the merge's rounding changes."""
    make, arguments = WAYS[way]
    on_base, merged = (Clients(make(**arguments, **more), kind="llama") for more in ({"base": BASE}, {}))
    server = on_base.run(cohort=1)  # so that some are first seen when their scales are predicted
    merge_base(on_base, into=merged)
    expected_server = merged.run(cohort=1)
    assert not any(one.journal.failures for one in (on_base, merged))
    assert_near({key: server.arrays[key] for key in expected_server.arrays}, expected_server.arrays, 1e-3, 1e-6)
    for client in "abc":
        found, expected = (one.memory(client).arrays for one in (on_base, merged))
        assert_near({key: found[key] for key in expected}, expected, rtol=1e-2, atol=1e-4)
    reports, expected_reports = personal_reports(on_base), personal_reports(merged)
    assert reports.keys() == expected_reports.keys()
    for key, report in expected_reports.items():
        # Scales that are still all but equal differ by little more than their rounding.
        assert reports[key] == pytest.approx(report, rel=1e-3, abs=1e-6), key


def base_losses(path: Path) -> list[tuple[int, str, float]]:
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    return [(line["round"], line["client"], line["loss"]) for line in lines if line["stage"] == "federate"]


SHARED: dict[str, Any] = {
    "benchmark": {"name": "digits", "clients": 2, "alpha": 10.0},
    "model": {"id": short_vit()},
    "limit": {"records": 24},
    "federation": {"rounds": 2},
    "report": {"plots": False},
    "baselines": [],
}
FEDIT: dict[str, Any] = {"name": "fedit", "rank": 2}
USUAL: dict[str, Any] = {"max_steps": 2, "lr": 1e-3}


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, float]]:
    """Of FedIT with the settings of the runs on a base."""
    experiment = load_experiment({**SHARED, "method": FEDIT, "train": USUAL})
    return base_losses(run(experiment, out=tmp_path_factory.mktemp("plain") / "run").path)


@pytest.mark.parametrize(
    ("changes", "dropout"),
    [({"lr": 0.05}, 0.0), ({"optimiser": "sgd", "momentum": 0.9, "lr": 0.5, "batch_size": 3}, 0.0), ({}, 0.5)],
)
def test_a_base_trains_as_it_would_alone_with_settings_of_its_own(
    changes: dict[str, Any], dropout: float, plain_losses: list[tuple[int, str, float]], tmp_path: Path
) -> None:
    """Loss by loss that of FedIT run with those settings, and what is trained on top of it has the run's."""
    as_alone = {**SHARED, "method": FEDIT, "train": {**USUAL, **changes}, "adapter": {"dropout": dropout}}
    alone = run(load_experiment(as_alone), out=tmp_path / "alone")
    lora = {"name": "lora", "rank": 1, "epochs": 1, "base": {**FEDIT, "train": changes, "dropout": dropout}}
    on_base = run(load_experiment({**SHARED, "method": lora, "train": USUAL}), out=tmp_path / "on")
    assert base_losses(on_base.path) == base_losses(alone.path) != plain_losses
    steps = [
        line
        for line in read_lines(on_base.path / "metrics.jsonl")
        if line["kind"] == "train" and line["stage"] == "budget"
    ]
    examples = {client: row["train_examples"] for client, row in on_base.results["clients"].items()}
    assert {line["client"]: line["steps"] for line in steps} == {
        client: -(-count // 10) for client, count in examples.items()
    }, "batches of ten, as the run has them"


def test_a_base_on_other_modules_and_by_passes_is_that_method_on_those_modules(tmp_path: Path) -> None:
    """Loss by loss FedIT on query and value, with as many steps as two passes are; ours is on all linear modules, the
    classifier among them, which the base has as a dense head."""
    alone = run(load_experiment({**SHARED, "method": FEDIT, "train": {"max_steps": 6}}), out=tmp_path / "alone")
    lora = {"name": "lora", "rank": 1, "base": {**FEDIT, "epochs": 2, "targets": ["query", "value"]}}
    settings = {**SHARED, "method": lora, "train": {"max_steps": 1}, "adapter": {"targets": "all-linear"}}
    on_base = run(load_experiment(settings), out=tmp_path / "on")
    assert {row["train_examples"] for row in on_base.results["clients"].values()} == {24}  # three batches of ten
    assert base_losses(on_base.path) == base_losses(alone.path)
    arrays, _ = from_bytes(next(on_base.path.glob("clients/*/deployment.safetensors")).read_bytes())
    assert {"shared/classifier/weight", "budgeted/classifier/A"} <= arrays.keys()
    assert "budgeted/classifier/weight" not in arrays and "shared/block.00.k_proj/A" not in arrays


def test_a_word_for_no_target_of_the_run_is_refused_before_it() -> None:
    base = {"name": "fedit", "targets": ["query", "keys"]}
    values = {"benchmark": "digits", "method": {"name": "lora", "base": base}, "baselines": []}
    with pytest.raises(ConfigError, match=r"base\.targets: keys is none of the modules that adapter\.targets adapts"):
        check(load_experiment(values))


def test_no_ranks_are_the_head_alone() -> None:
    """`rank: 0` trains the head, and nothing else is there; without a head it is refused."""
    clients = Clients(Lora(rank=0), kind="bert")
    clients.run()
    kept = clients.memory("a").arrays
    assert {key for key in kept if not key.startswith("optimiser")} == {
        "budgeted/classifier/weight",
        "budgeted/classifier/bias",
    }
    assert float(kept["budgeted/classifier/weight"].abs().max()) > 0.01
    headless = {"benchmark": "digits", "adapter": {"head": False}, "method": {"name": "lora", "rank": 0}}
    with pytest.raises(ConfigError, match="rank: 0 trains the task head alone, and here none is trained"):
        check(load_experiment({**headless, "baselines": []}))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": {"lr": -1}}, r"base\.train\.lr: must be positive, got -1"),
        ({"train": {"rate": 1}}, r"base\.train\.rate: unknown key"),
        ({"train": {"max_steps": 3}}, r"base\.train\.max_steps: a base trains for train\.max_steps in a round"),
        ({"targets": []}, r"base\.targets: must name at least one module, or be null"),
        ({"train": 0.1}, r"base\.train: must be a mapping or null, got 0\.1"),
        ({"epochs": 0}, r"base\.epochs: must be positive, got 0"),
        ({"dropout": 1.0}, r"base\.dropout: must be at least 0 and below 1, got 1\.0"),
        ({"trian": {}}, r"base\.trian: unknown key for fedit.* A base has rounds, train, epochs, dropout, targets too"),
    ],
)
def test_settings_that_a_base_cannot_have_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method({"name": "lora", "rank": 2, "base": {"name": "fedit", "rank": 2, **given}})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"momentum": 0.5}, "base.train: momentum: belongs to sgd, but optimiser is adamw"),
        ({"lr_end": 1e-4}, "base.train: lr_end: belongs to a schedule that falls, and schedule is constant"),
        ({"lr_end": 1e-2, "schedule": "linear"}, "base.train: lr_end: a schedule falls from lr, which is 0.001"),
    ],
)
@pytest.mark.parametrize("name", ["lora", "fedp2eft"])
def test_settings_of_a_base_that_contradict_the_runs_are_refused(name: str, given: dict[str, Any], told: str) -> None:
    method = {"name": name, "base": {"name": "fedit", "train": given}}
    with pytest.raises(ConfigError, match=told):
        check(load_experiment({"benchmark": "digits", "method": method, "baselines": []}))


def test_settings_that_rates_of_its_own_leave_without_effect_are_warned_of() -> None:
    train = {"loraplus_ratio": 4.0, "optimiser": "sgd"}
    found = check(load_experiment({"benchmark": "digits", "method": "fedl2p", "baselines": ["local"], "train": train}))
    told = [one for one in found["warnings"] if "FedL2P's own stages" in one]
    assert len(told) == 2 and "train.loraplus_ratio" in told[0] and "train.optimiser" in told[1]


def test_an_estimate_counts_the_larger_batch_of_a_base() -> None:
    plain: dict[str, Any] = {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "baselines": []}
    based = {**plain, "method": {"name": "lora", "base": {"name": "fedit", "train": {"batch_size": 200}}}}
    found = check(load_experiment(based))
    expected = check(load_experiment({**plain, "method": "fedit", "train": {"batch_size": 200}}))
    assert found["memory_parts_mib"]["activations"] == expected["memory_parts_mib"]["activations"]
    assert any("fewer training examples than train.batch_size, 200" in one for one in found["warnings"])
