"""The server holds shapes: it needs a model's config.json and no weights, unless a method runs the model there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from befit.adapters.keys import EVERYTHING
from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, ModelError
from befit.flower.server_app import run_over
from befit.runs.host import Host
from befit.runs.loading import load_model
from befit.runs.runner import run
from tests.backbones import short_vit
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import local_memories, same, server_memory, site_memories

Make = Callable[..., Experiment]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model's folder without its weights."""
    shutil.copytree(short_vit(), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "bare"


def sites_with(models: list[str], bare: Path, folder: Path) -> list[Path]:
    sites = []
    for number, place in enumerate(models):
        site = write_site(folder / f"site-{number}", f"client-0{number}")
        site.write_text(re.sub("models: .*", f"models: {{{bare}: {place}}}", site.read_text()))
        sites.append(site)
    return sites


@pytest.mark.parametrize("method", ["fedit", "potara"])
def test_a_server_without_weights_has_the_numbers_of_a_local_run(
    method: str, bare: Path, experiment: Make, tmp_path: Path
) -> None:
    """FedIT averages; Potara's server solves for merging weights. Neither looks at the backbone."""
    model: dict[str, Any] = {"model": {"id": str(bare)}}
    sites = sites_with([short_vit()] * 2, bare, tmp_path)
    remote = run_over(LoopbackGrid(sites), experiment(method, **model), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment(method, {"store": "disk"}), out=tmp_path / "local").path
    there = site_memories(remote, dict(zip(("client-00", "client-01"), sites, strict=True)), method)
    assert same(server_memory(remote), server_memory(local))
    assert all(same(there[client], memory) for client, memory in local_memories(local).items())
    with pytest.raises(ModelError, match=r"no .*model\.safetensors"):
        Host(experiment(method, {"store": "disk"}, **model))


def test_a_site_with_different_weights_is_named_and_left_out(bare: Path, experiment: Make, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(short_vit(), other)
    weights = load_file(other / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    sites = sites_with([short_vit(), short_vit(), str(other)], bare, tmp_path)
    three = {"model": {"id": str(bare)}, "benchmark": {"name": "digits", "clients": 3}}
    done = run_over(LoopbackGrid(sites), experiment("fedit", **three), tmp_path / "remote", poll_s=0.01)
    failures = json.loads((done.path / "results.json").read_text())["failures"]
    assert {failure["client"] for failure in failures} == {"client-02"}
    assert all("site client-02 has another backbone: fingerprint" in failure["reason"] for failure in failures)
    demanding = experiment("fedit", **three, federation={"rounds": 1, "min_replies": 3})
    with pytest.raises(ConfigError, match=r"site client-02 .* fingerprint") as error:
        run_over(LoopbackGrid(sites), demanding, tmp_path / "demanding", poll_s=0.01)
    assert "client-01" not in str(error.value)


def test_shapes_hold_no_weights_and_the_same_initial_adapters(bare: Path) -> None:
    """What the server sends in the first round is made from seed, names and shapes."""
    known = {"benchmark": {"name": "digits"}, "method": "fedit", "model": {"id": short_vit()}}
    whole = Host(load_experiment(known))
    shapes = load_experiment({**known, "model": {"id": str(bare)}})
    model, task, identity = load_model(shapes, "image-classification", whole.federation.label_names, whole.fingerprint)
    assert {parameter.device.type for parameter in model.backbone.parameters()} == {"meta"}
    assert model.device.type == "cpu" and task.metric == whole.task.metric and identity == whole.fingerprint
    method = whole.build("fedit")
    whole.model.install(method.layout, 3)
    model.install(method.layout, 3)
    ours, theirs = model.dump(EVERYTHING), whole.model.dump(EVERYTHING)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
