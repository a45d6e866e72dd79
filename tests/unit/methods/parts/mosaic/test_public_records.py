"""What `befit check` refuses of FedMosaic with two backbones: no public records, and PQ sites that do not match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from befit.config.experiment import load_experiment
from befit.core.errors import ConfigError
from befit.data.registry import build
from befit.protocol.check import Context
from befit.protocol.check import check as check_method
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.runs.host import Host
from befit.runs.runner import check
from tests.unit.models.tiny_models import save_gpt2

LONG = TrainSettings(max_steps=100)  # enough records behind every gradient


def test_two_backbones_without_public_records_are_refused_before_anything_is_trained() -> None:
    federation = build("skills", None, {"clients": 4})
    bare = replace(federation, public=())
    ids = [client.id for client in federation.clients]
    two = {client: ("small", "model")[place % 2] for place, client in enumerate(ids)}
    method = build_method("fedmosaic")
    (problem,) = check_method(method, Context(bare, two, LONG))
    assert problem.severity == "error" and "public records" in problem.text and "skills has none" in problem.text
    assert not check_method(method, Context(federation, two, LONG))
    assert not check_method(method, Context(bare, dict.fromkeys(ids, "model"), LONG))
    assert not check_method(build_method("rela"), Context(bare, two, LONG))


def test_two_backbones_with_other_projections_are_refused_by_check_with_the_key_to_change(tmp_path: Path) -> None:
    """A Llama has q_proj and v_proj where GPT-2 has one projection for all three; alone, either is well."""
    config = {
        "benchmark": {"name": "skills", "clients": 2, "train": 4, "val": 1, "test": 1},
        "model": {"id": "skills-llama-s", "max_length": 32},
        "adapter": {"targets": "auto"},
        "baselines": [],
        "families": {"other": {"clients": ["drop-first.*"], "model": {"id": str(save_gpt2(tmp_path / "gpt2"))}}},
        "method": {"name": "fedmosaic", "rank": 2, "blocks": 1},
        "evaluate": {"newcomers": False},
    }
    said = r"method fedmosaic: the backbones model and other differ in their PQ sites: 0\.\w+ .*set adapter\.targets"
    with pytest.raises(ConfigError, match=said):
        check(config)
    host = Host(load_experiment(config))
    (problem,) = host.problems("fedmosaic", config["method"])  # type: ignore[arg-type]
    assert "differ in their PQ sites" in problem
    assert not host.problems("rela", {"name": "rela", "rank": 2})
    assert check({**config, "families": {}})["families"] == []
