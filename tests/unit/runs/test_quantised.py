"""A run over a backbone in 8 or 4 bits: scores between rounds change nothing, and its adapters are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.models import skeleton
from befit.runs.artifacts import predict
from befit.runs.host import Host
from befit.runs.runner import check, run
from tests.unit.models.tiny_models import save_llama


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    save_llama(tmp_path / "model", hidden_size=96, intermediate_size=64)
    for client in ("a", "b"):
        rows = [{"instruction": "copy", "input": word, "output": word} for word in ["a", "b", "c", "d", "e"] * 4]
        (tmp_path / f"{client}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "method": {"name": "ditto", "rank": 2, "alpha": 4},
        "baselines": [],
        "model": {"id": str(tmp_path / "model"), "max_length": 64},
        "data": {"task": "causal-lm", "clients": {client: str(tmp_path / f"{client}.jsonl") for client in "ab"}},
        "train": {"max_steps": 2, "batch_size": 4, "lr": 1e-2},
        "federation": {"rounds": 2},
        "report": {"plots": False},
    }


@pytest.mark.parametrize("quantise", ["int8", "nf4"])
def test_a_run_gives_the_same_adapters_however_often_it_is_scored(
    quantise: str, values: dict[str, Any], tmp_path: Path
) -> None:
    adapters = []
    for every in (0, 1):
        experiment = load_experiment({**values, "evaluate": {"every": every}}, [f"model.quantise={quantise}"])
        done = run(experiment, out=tmp_path / f"run-{every}")
        folders = sorted(done.path.glob("clients/*/adapter"))
        adapters.append([load_file(folder / "adapter_model.safetensors") for folder in folders])
    assert len(adapters[0]) == 2
    for first, second in zip(*adapters, strict=True):
        assert first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)
    answers = predict(tmp_path / "run-1", "a", [{"instruction": "copy", "input": "a"}])
    assert len(list(answers)) == 1


@pytest.mark.parametrize("quantise", ["none", "int8", "nf4"])
def test_a_backbone_has_as_many_parameters_however_it_is_held(quantise: str, values: dict[str, Any]) -> None:
    """So that the smallest of several is the same for a server that knows shapes alone."""
    host = Host(load_experiment(values, [f"model.quantise={quantise}"]))
    shapes = skeleton(host.experiment.model, "causal-lm", ())
    assert host.common.parameters == sum(parameter.numel() for parameter in shapes.parameters())


def test_what_trains_every_weight_is_refused_before_a_run(values: dict[str, Any]) -> None:
    changes = {"model": {**values["model"], "quantise": "nf4"}, "method": "fedavg"}
    with pytest.raises(ConfigError, match=r"method fedavg: model.quantise: nf4 weights cannot be trained in full"):
        check(load_experiment({**values, **changes}))
