"""What `befit check` refuses of FedMosaic with two backbones: no public records, and PQ modules that do not match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from befit.cli.inspect import _check_rows
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.data.registry import build
from befit.methods.parts.mosaic.align.memory import alignment_bytes
from befit.methods.parts.mosaic.align.settings import Alignment
from befit.protocol.check import check as check_method
from befit.protocol.context import Context
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
    said = r"method fedmosaic: the backbones model and other differ in their PQ modules: 0\.\w+ .*set adapter\.targets"
    with pytest.raises(ConfigError, match=said):
        check(config)
    host = Host(load_experiment(config))
    with pytest.raises(ConfigError, match="differ in their PQ modules"):
        host.check_methods({"fedmosaic": config["method"]})  # type: ignore[dict-item]
    host.check_methods({"rela": {"name": "rela", "rank": 2}})
    assert check({**config, "families": {}})["families"] == []


def test_a_check_says_what_the_server_needs_before_the_first_round() -> None:
    """Nothing with one backbone; with two what `alignment_bytes` counts, for `max_length` tokens a record."""
    config = {
        "benchmark": {"name": "skills", "clients": 2, "train": 4, "val": 1, "test": 1},
        "model": {"id": "skills-llama-s", "max_length": 32},
        "adapter": {"targets": ["q_proj", "k_proj", "down_proj"]},
        "baselines": [],
        "families": {"other": {"clients": ["drop-first.*"], "model": {"id": "skills-llama"}}},
        "method": {"name": "fedmosaic", "rank": 2, "blocks": 1},
        "evaluate": {"newcomers": False},
    }
    found = check(config)
    host = Host(load_experiment(config))
    shapes = {backbone.name: backbone.model.shapes for backbone in host.backbones.values()}
    expected = alignment_bytes(shapes, 2, 1, Alignment(), 32)
    assert found["opening_mib"] == expected / 2**20 > 0
    assert dict(_check_rows(found))["before the first round"].startswith(f"{expected / 2**20:,.1f} MiB beside")
    assert check({**config, "families": {}})["opening_mib"] == 0
    assert check({**config, "method": "fedit"})["opening_mib"] == 0
