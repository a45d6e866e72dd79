"""Settings of training that depend on a client's own examples: passes over them, and weights of their classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import load_experiment
from befit.core.errors import ConfigError
from befit.flower.amounts import exceeded, too_many_passes
from befit.flower.site_file import Limits
from befit.protocol.registry import build_method
from befit.runs.host import Host
from befit.runs.runner import run, shared
from befit.studies.compare.choice import equal_steps


def settings(**train: Any) -> dict[str, Any]:
    return {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 0.5},
        "method": "fedit",
        "baselines": [],
        "train": {"batch_size": 40, **train},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }


def test_every_client_passes_over_its_own_examples(tmp_path: Path) -> None:
    done = run(settings(epochs=2), out=tmp_path / "run")
    lines = [json.loads(line) for line in (done.path / "metrics.jsonl").read_text().splitlines()]
    steps = {line["client"]: line["steps"] for line in lines if line["kind"] == "train"}
    counts = {info.id: info.num_examples for info in Host(load_experiment(settings())).infos}
    assert steps == {client: 2 * -(-count // 40) for client, count in counts.items()}
    assert len(set(steps.values())) > 1


def test_training_examples_have_weights_and_no_others_also_where_a_host_serves_two_runs() -> None:
    plain, weighted = (load_experiment(settings(class_weights=how)) for how in ("none", "balanced"))
    assert shared(plain) == shared(weighted)  # so a comparison gives both the same host
    host = Host(weighted)
    client = host.infos[0].id
    weights = host.examples(client, "train").batch([0, 1, 2])["weights"]
    assert len(weights) == 3 and float(weights.min()) > 0
    assert "weights" not in host.examples(client, "test").batch([0])
    host.experiment = plain
    assert "weights" not in host.examples(client, "train").batch([0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train": {"epochs": 1}, "stream": {"kind": "static"}}, "train.epochs: training data that arrives over time"),
        (
            {"train": {"class_weights": "balanced"}, "benchmark": "skills"},
            "train.class_weights: causal-lm has no classes",
        ),
        ({"train": {"epochs": 0}}, "train.epochs: must be positive"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment({**settings(), **change})
    assert told in str(caught.value)


def test_equal_compute_counts_steps_and_refuses_passes() -> None:
    with pytest.raises(ConfigError, match="train.epochs is by a client's examples"):
        equal_steps(load_experiment(settings(epochs=1)), 1, 5)


def test_a_site_holds_passes_to_its_most_steps() -> None:
    experiment = load_experiment(settings(epochs=3))
    limits = replace(Limits(), max_steps=20)
    assert not [*exceeded(experiment, build_method(experiment.method), limits)]
    assert not [*too_many_passes(240, experiment, limits)]  # 3 x 6 steps
    assert [*too_many_passes(241, experiment, limits)] == [
        "train.epochs: the steps of 3 passes: 21 is more than the site allows, 20 (limits.max_steps)"
    ]
