"""What a run leaves at a site: befit predicts, exports and measures there as after a run on one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from befit.config.experiment import Experiment
from befit.core.errors import RunError
from befit.flower.server_app import run_over
from befit.runs.artifacts import predict
from befit.runs.exporting import ExportForm, export, export_all
from befit.runs.measuring import measure
from befit.runs.runner import Run, run
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import site_folder

Make = Callable[..., Experiment]
FLOWER = {"kind": "flower", "wait_s": 1.0}


@pytest.fixture
def runs(grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path) -> tuple[Run, Run]:
    """The same at sites and here: two servers' momenta, which a site does not know, and training alone."""
    clients: dict[str, str] = {}
    for number, site in enumerate(sites):
        lines = []
        for picture in range(30):
            Image.new("L", (8, 8), 8 * picture + 100 * (picture % 2)).save(site.parent / f"{picture}.png")
            lines.append(json.dumps({"picture": f"{picture}.png", "label": "ab"[picture % 2]}))
        (site.parent / "data.jsonl").write_text("\n".join(lines))
        site.write_text(
            site.read_text().replace(
                "benchmarks: [digits]", "data: data.jsonl\ncolumns: {image: picture}\nlimits: {min_records: 3}"
            )
        )
        clients[f"client-0{number}"] = str(site.parent / "data.jsonl")

    def of(places: dict[str, str], engine: dict[str, Any]) -> Experiment:
        data = {"task": "image-classification", "label_names": ["a", "b"], "clients": places, "test_fraction": 0.2}
        return experiment(
            {"name": "fedavgm", "momentum": 0.5},
            engine,
            benchmark=None,
            model={"id": "digits-vit"},
            data={**data, "columns": {"image": "picture"}, "val_fraction": 0.2},
            baselines=[{"name": "local", "rounds": 1}, {"name": "fedavgm", "momentum": 0.0}],
            federation={"rounds": 2, "deploy": "best"},
        )

    here = run(of(clients, {"store": "disk"}), out=tmp_path / "local")
    return run_over(grid, of(dict.fromkeys(clients, "there"), FLOWER), tmp_path / "run", poll_s=0.01), here


def test_a_site_asks_its_models_as_one_asks_those_of_a_run_here(
    runs: tuple[Run, Run], sites: list[Path], tmp_path: Path
) -> None:
    there, here = runs
    for number, site in enumerate(sites):
        client, state = f"client-0{number}", site_folder(there.path, site, "")
        pictures = [site.parent / "1.png", site.parent / "2.png"]
        for label in ("fedavgm", "local", "fedavgm-momentum-0.0"):
            assert predict(state / label, client, pictures) == predict(here, client, pictures, label)
            files = [site.parent / "data.jsonl"]
            assert measure(state / label, client, files) == measure(here.path, client, files, label)
        chosen = json.loads((state / "chosen.json").read_text())["run"]
        assert here.results["clients"][client]["deployed"] == chosen
        weights = [
            export(path, client, tmp_path / f"{place}-{client}") / "adapter_model.safetensors"
            for place, path in (("there", state / chosen), ("here", here.path))
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        (exported,) = export_all(state / "local", tmp_path / f"all-{client}", ExportForm(rank=1))
        assert exported.client == client and exported.cut is not None  # measured on the site's own test records
        other = f"client-0{1 - number}"
        with pytest.raises(RunError, match=f"has no client '{other}'; it has {client}"):
            predict(state / chosen, other, pictures)
        with pytest.raises(RunError, match=r"run directory: .*; name one of those in it: fedavgm, fedavgm-m.*, local"):
            predict(state, client, pictures)
