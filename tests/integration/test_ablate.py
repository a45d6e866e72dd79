"""Every ablation through the command line, on one set of branches, after a training that was killed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.experiment import to_yaml
from befit.config.load import load_experiment
from befit.studies.ablations.measure import ablate
from tests.processes import PATIENCE, befit, begin

CONFIG = {
    "name": "killed",
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0, "seed": 0},
    "method": {"name": "potara", "rank": 2, "rounds_local": 3, "statistics": {"samples": 6}},
    "train": {"max_steps": 1},
    "federation": {"rounds": 40},
    "checkpoint": {"every_s": 0.0},
}


def start_and_kill(config: Path, out: Path) -> None:
    """Kill the command once it has saved a checkpoint of the federated stage."""
    process = begin(befit, "ablate", "potara-damping", str(config), "--out", str(out), "--quiet")
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and process.is_alive():
            found = list(out.glob("runs/*/checkpoint.json"))
            if found and json.loads(found[0].read_text())["stage"] == 1:
                break
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert list(out.glob("runs/*/checkpoint.json"))
    assert not list(out.glob("runs/*/method.json")), "it was done before it could be killed"


@pytest.mark.slow
def test_ablations_work_on_branches_whose_training_was_killed(tmp_path: Path) -> None:
    config, out = tmp_path / "killed.yaml", tmp_path / "out"
    config.write_text(to_yaml(load_experiment(CONFIG)))
    start_and_kill(config, out)
    for name in ("potara-damping", "potara-samples", "potara-rounds"):  # the weights, the examples, the training
        done = CliRunner().invoke(app, ["ablate", name, str(config), "--out", str(out), "--json", "--quiet"])
        assert done.exit_code == 0, f"{name}: {done.stderr}"
        rows = json.loads(done.stdout)["results"]["rows"]
        assert {row["client"] for row in rows} == {"client-00", "client-01", "client-02"}
        for suffix in ("json", "csv", "md", "html"):
            assert (out / name / f"ablation.{suffix}").stat().st_size > 200
        assert "<svg" in (out / name / "ablation.html").read_text()
    assert len(list((out / "shared").iterdir())) == 2, "one folder for each branch"
    undisturbed = ablate("potara-damping", CONFIG, out=tmp_path / "other")
    assert json.loads((out / "potara-damping" / "ablation.json").read_text())["rows"] == undisturbed.results["rows"]
