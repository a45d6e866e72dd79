"""A short run of Potara on three clients with real digits, and an ablation directory of the same configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import befit
from befit.core.storage import read_sealed
from befit.studies.ablations.measure import FinishedAblation, ablate
from tests.backbones import short_vit

CONFIG: dict[str, Any] = {
    "name": "short",
    "model": {"id": short_vit()},
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0, "seed": 0},
    "limit": {"records": 60},
    "method": {"name": "potara", "rank": 2, "rounds_local": 2, "statistics": {"samples": 8}},
    "baselines": [{"name": "local", "rank": 2, "rounds": 2}, {"name": "fedit", "rank": 2}],
    "train": {"max_steps": 2},
    "federation": {"rounds": 3},
    "evaluate": {"every": 1},
    "report": {"plots": False},
}


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that `befit run` makes of the configuration."""
    return befit.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run").path


@pytest.fixture(scope="session")
def run_results(run_path: Path) -> dict[str, Any]:
    """What its results.json says."""
    return read_sealed(run_path / "results.json")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all ablations of the configuration."""
    return tmp_path_factory.mktemp("ablations")


@pytest.fixture(scope="session")
def sweep(root: Path) -> FinishedAblation:
    return ablate("potara-weight-sweep", CONFIG, out=root, options={"step": 0.5})
