"""Every client deploys what its own held-out data prefer of all that a run trained (`federation.deploy: best`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import sem

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.storage import read_json, read_sealed, write_json
from befit.runs.artifacts import predict
from befit.runs.deploy import CHOICE, SURE, Choice, choose, preferred
from befit.runs.exporting import export
from befit.runs.loading import load_federation
from befit.runs.runner import check, run
from befit.studies.compare.comparison import compare

CONFIG: dict[str, Any] = {
    "benchmark": {"name": "scanners", "clients": 4},
    "limit": {"records": 40},  # test images; those that decide are fewer
    "model": {"id": "digits-vit-augmented"},
    "method": {"name": "fedit", "rank": 2},
    "baselines": [{"name": "local", "rank": 2, "rounds": 4}, {"name": "feddpa", "rank": 2}],
    "train": {"max_steps": 3, "batch_size": 10, "lr": 1e-2},
    "federation": {"rounds": 3, "deploy": "best"},
    "report": {"plots": False},
}


HELD_OUT = "clients/{}/held_out.json"


def losses(path: Path, client: str) -> float:
    """The mean loss on a client's validation images, from what it says of them."""
    records = next(one for one in load_federation(load_experiment(CONFIG)).clients if one.id == client).val
    answers = predict(path, client, [record["image"] for record in records])
    right = [
        list(answer["probabilities"].values())[record["label"]] for answer, record in zip(answers, records, strict=True)
    ]
    return float(-torch.tensor(right, dtype=torch.float64).log().mean())


def test_each_client_deploys_the_run_of_least_held_out_loss_and_nothing_else_changes(tmp_path: Path) -> None:
    done = run(CONFIG, out=tmp_path / "best")
    without = {**CONFIG, "federation": {"rounds": 3}}
    plain = run(without, out=tmp_path / "plain").results
    results, labels = done.results, ["local", "feddpa", "fedit"]
    assert results["method"] == CHOICE and list(results["baselines"]) == labels
    folders = {"fedit": done.path, **{label: done.path / "baselines" / label for label in labels[:2]}}
    for client, row in results["clients"].items():
        each = {label: np.array(read_json(folders[label] / HELD_OUT.format(client))["losses"]) for label in labels}
        better = {label: each["local"] - each[label] for label in labels}
        sure = [name for name in labels[1:] if better[name].mean() > SURE * sem(better[name])]
        label = min(sure, key=lambda label: row["held_out"][label], default="local")
        assert row["deployed"] == label and row["accuracy"] == row["baselines"][label]
        assert row["baselines"] == {
            **plain["clients"][client]["baselines"],
            "fedit": plain["clients"][client]["accuracy"],
        }
        exported = export(done.path, client, tmp_path / client) / "adapter_model.safetensors"
        assert exported.read_bytes() == (folders[label] / "clients" / client / "adapter" / exported.name).read_bytes()
        assert losses(done.path, client) == pytest.approx(row["held_out"][label], abs=1e-5)
        summed = sum(read_sealed(folder / "method.json")["clients"][client]["bytes_up"] for folder in folders.values())
        assert row["bytes_up"] == summed > 0
    chosen = [row["deployed"] for row in results["clients"].values()]
    assert len(set(chosen)) > 1, "the settings of this test should make clients differ"
    for page in ("report.md", "report.html"):
        assert "Deployed, by held-out data:" in (done.path / page).read_text()
    resumed = run(CONFIG, out=tmp_path / "best", resume=True).results
    assert json.dumps(resumed) == json.dumps(results)


def test_a_study_has_the_choice_as_a_run_and_trains_the_same_stages_once(tmp_path: Path) -> None:
    base = {key: value for key, value in CONFIG.items() if key not in ("baselines", "method")}
    local, fedit = CONFIG["baselines"][0], CONFIG["method"]
    study = {
        "study": {"title": "Choices", "reference": "Local"},
        "base": {**base, "federation": {"rounds": 3}},
        "seeds": [0],
        "runs": {
            "Local": {"method": local},
            "FedIT": {"method": fedit},
            "Choice": {"method": fedit, "set": {"federation.deploy": "best", "baselines": [local]}},
        },
    }
    done = compare(study, out=tmp_path)
    assert not done.failures and done.results is not None
    local_run, fedit_run, choice = done.results["runs"]
    ours, others = (choice["seeds"][0], (local_run["seeds"][0], fedit_run["seeds"][0]))
    for client, score in ours["clients"].items():
        assert score in {other["clients"][client] for other in others}
    assert ours["steps"] == sum(other["steps"] for other in others)
    assert ours["bytes_up"] == fedit_run["seeds"][0]["bytes_up"] > 0
    assert choice["against"] is not None and choice["against"]["examples"] is not None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"baselines": []}, "there are no baselines"),
        ({"evaluate": {"split": "val"}}, "would flatter the choice"),
        ({"benchmark": {"name": "names-small"}, "model": {"id": "names-bert-mlm"}}, "val_fraction holds some"),
    ],
)
def test_without_a_choice_or_without_held_out_data_a_run_is_refused_before_it_starts(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    for attempt in (check, lambda config: run(config, out=tmp_path / "run")):
        with pytest.raises(ConfigError, match=says):
            attempt({**CONFIG, **changes})
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_model_without_a_finite_loss_is_no_choice(tmp_path: Path) -> None:
    notes = {"local": [1.0, None], "fedit": [2.0, 2.0], "feddpa": [1.0, 3.0]}
    for label, losses in notes.items():
        write_json(tmp_path / label / "held_out.json", {"alone": label == "local", "losses": losses})
    folders = {label: tmp_path / label for label in (*notes, "potara")}  # the last one was not exported
    assert choose(folders) == Choice("fedit", {"fedit": 2.0, "feddpa": 2.0})
    assert choose({"local": tmp_path / "local"}) == Choice(None, {})


def test_what_is_trained_alone_gives_way_to_what_is_surely_better() -> None:
    alone, unsure, small = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.6], [0.9, 0.8, 0.9, 0.8]
    # Below by 0.35 with a standard error of 0.65, and by 0.15 with one of 0.03.
    assert preferred({"local": alone, "fedit": unsure}, ["local"]) == "local"
    assert preferred({"local": alone, "fedit": unsure}, []) == "fedit"
    assert preferred({"local": alone, "fedit": unsure, "feddpa": small}, ["local"]) == "feddpa"
    assert preferred({"local": [2.0] * 4, "long": alone, "fedit": [1.1] * 4}, ["local", "long"]) == "long"
    assert preferred({"local": [2.0], "fedit": [1.0]}, ["local"]) == "local", "one example makes nobody sure"
