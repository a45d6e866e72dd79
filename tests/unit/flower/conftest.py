"""Sites on a loopback grid, and experiments that run on it and locally."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.flower.loopback import LoopbackGrid

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from tests.backbones import short_vit

SMALL: dict[str, Any] = {
    "name": "small",
    "benchmark": {"name": "digits", "clients": 2},
    "limit": {"records": 40},  # over three rounds more than a site trains on at least
    "train": {"max_steps": 2},
    "federation": {"rounds": 2},
    "baselines": [],
    "checkpoint": {"every_s": 0},
    "report": {"plots": False},
}


@pytest.fixture
def sites(tmp_path: Path) -> list[Path]:
    from tests.unit.flower.loopback import write_site

    return [
        write_site(tmp_path / f"site-{number}", f"client-0{number}", "shares: [personal, sketch]\n")
        for number in range(2)
    ]


@pytest.fixture
def grid(sites: list[Path]) -> LoopbackGrid:
    from tests.unit.flower.loopback import LoopbackGrid

    return LoopbackGrid(sites)


@pytest.fixture
def experiment() -> Callable[..., Experiment]:
    def make(method: str | dict[str, Any] = "fedit", engine: dict[str, Any] | None = None, **more: Any) -> Experiment:
        # A folder that only this process knows, so not what several processes share in SMALL.
        values = {**SMALL, "model": {"id": short_vit()}, "method": method, "engine": engine or {"kind": "flower"}}
        values |= more
        return load_experiment({key: value for key, value in values.items() if value is not None})

    return make
