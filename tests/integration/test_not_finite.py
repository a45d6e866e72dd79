"""Numbers that are none are a failure wherever they come from: in a run, in a comparison, and in a choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.yamlfile import parse_yaml, write_yaml
from befit.protocol.registry import METHODS

PLUGIN = '''
"""Averages, and can go wrong on the way."""
import befit
from befit import Exchange, Message, Method, Pass, Payload, Stage, Use, slot

SHARED = slot("shared")


def spoilt(arrays):
    return {key: value * float("nan") for key, value in arrays.items()}


class Averaging(Exchange):
    def __init__(self, how):
        self.how = how

    def dispatch(self, server, client, at):
        return server

    def client_update(self, client, received, site, at):
        site.model.load(received.arrays)
        yield from befit.training(site, [Pass(SHARED, ("shared",))], at)
        return client, Payload(site.model.dump(SHARED))

    def aggregate(self, server, updates, site, at):
        mean = befit.weighted_mean((u.payload.arrays for u in updates), [1.0 for _ in updates])
        return Payload(spoilt(mean) if self.how == "aggregate" else mean)


@befit.register("spoils", title="Spoils")
class Spoils(Method):
    """Average (up = down = r(d_in + d_out) per module).

    how  what goes wrong
    """

    use = Use(("shared",))

    def __init__(self, how: str = "nothing"):
        self.layout, self.how = befit.lora(2, 4.0), how

    def plan(self):
        adapter = Message(SHARED)
        return [Stage("federate", Averaging(self.how), up=adapter, down=adapter, trains=SHARED)]

    def server_init(self, site):
        return Payload(befit.select_state(site.initial, SHARED))

    def deploy(self, client, received, site):
        return befit.Deployment(spoilt(received.arrays) if self.how == "deploy" else received.arrays, ("shared",))
'''
BASE = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "limit": {"records": 24},
    "train": {"max_steps": 1, "batch_size": 8},
    "federation": {"rounds": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "spoils.py").write_text(PLUGIN)
    yield tmp_path
    METHODS.pop("spoils", None)


def test_a_run_whose_models_are_not_finite_has_no_score_and_its_commands_say_why(folder: Path) -> None:
    config, out = folder / "run.yaml", folder / "out"
    method = {"name": "spoils", "how": "deploy"}
    config.write_text(write_yaml({**BASE, "plugins": ["spoils.py"], "method": method, "baselines": []}))
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(out), "--quiet", "report.plots=false"])
    assert done.exit_code == 1 and "no client has a model that could be scored" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["summary"]["mean"] is None
    assert {row["adapter"] for row in results["clients"].values()} == {None}
    assert {failure["kind"] for failure in results["failures"]} == {"NotFinite"}
    again = CliRunner().invoke(app, ["export", str(out), "--client", "client-00", "--out", str(folder / "copy")])
    assert again.exit_code == 2 and "client client-00 has no adapter: " in again.stderr
    assert "not finite" in again.stderr and "no longer" not in again.stderr


def test_a_step_of_the_servers_that_is_too_long_ends_a_run_in_its_last_round_too(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(write_yaml({**BASE, "method": {"name": "fedavgm", "server_lr": 1e39}, "baselines": []}))
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 1
    assert "TrainingDiverged: the server's memory after round 1 of stage federate" in done.stderr
    assert not (tmp_path / "out" / "results.json").exists()


def test_in_a_study_it_is_a_failed_cell_and_as_a_candidate_it_loses(folder: Path) -> None:
    study = {
        "study": {"title": "Spoilt"},
        "plugins": ["spoils.py"],
        "base": {**BASE, "method": "spoils"},
        "runs": {"Local": "local", "Spoils": {"method": {"name": "spoils", "how": "deploy"}}},
        "seeds": [0],
    }
    path = folder / "study.yaml"
    path.write_text(write_yaml(study))
    done = CliRunner().invoke(app, ["compare", str(path), "--out", str(folder / "out"), "--quiet", "--json"])
    assert done.exit_code == 1
    (failure,) = json.loads(done.stdout)["failures"]
    assert failure["label"] == "Spoils" and "not finite" in failure["error"]
    tried = {"seeds": [5], "compute": "as-written", "axes": {"method.how": ["deploy", "aggregate", "nothing"]}}
    path.write_text(write_yaml({**study, "runs": {"Spoils": "spoils"}, "choose": tried}))
    done = CliRunner().invoke(app, ["compare", str(path), "--out", str(folder / "choice"), "--quiet", "--choose"])
    assert done.exit_code == 0 and done.stderr.count("training diverged, so it was not chosen") == 2
    kept = parse_yaml((folder / "study.chosen.yaml").read_text(), "chosen")
    assert kept["settings"] == {"Spoils": {"method.how": "nothing"}}
    assert [score.get("diverged") for score in kept["scores"]["Spoils"]] == [True, True, None]
    steps = [run["steps"] for run in json.loads((folder / "choice" / "compare.json").read_text())["runs"]]
    assert steps[-1] == 1  # counted, though the method tells of none
