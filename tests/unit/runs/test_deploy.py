"""Every client deploys what its own held-out data prefer of all that a run trained (`federation.deploy: best`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, RunError
from befit.core.storage import read_sealed, write_sealed
from befit.report.comparison import gain_over
from befit.runs.artifacts import predict
from befit.runs.deploy import CHOICE, Choice, choose, deployed_results, preferred
from befit.runs.exporting import export
from befit.runs.loading import load_federation
from befit.runs.local import LocalEngine
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
        label = min(labels, key=lambda label: row["held_out"][label])
        assert row["deployed"] == label and row["accuracy"] == row["baselines"][label]
        assert row["errors"].keys() == set(labels) - {label}  # of a model from itself there is nothing uncertain
        own = gain_over(results, row, label)
        assert own is not None and own.value == 0 and own.error is None
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
    # What was removed since is made again: a site must not be left with what it did not prefer.
    first, second = list(results["clients"])[:2]
    shutil.rmtree(done.path / "deployed" / first)
    with pytest.raises(RunError, match=f"no longer holds what client {first} deploys.* --resume"):
        predict(done.path, first, [])
    run(CONFIG, out=tmp_path / "best", resume=True)
    assert losses(done.path, first) == pytest.approx(min(results["clients"][first]["held_out"].values()), abs=1e-5)
    (folders["local"] / "clients" / first / "held_out.json").unlink()
    shutil.rmtree(folders["fedit"] / "clients" / second)
    with pytest.raises(RunError, match=f"no longer holds what client {second} deploys"):
        predict(done.path, second, [], method="fedit")
    again = run(CONFIG, out=tmp_path / "best", resume=True).results
    for client, row in results["clients"].items():
        assert [again["clients"][client][key] for key in ("deployed", "held_out", "accuracy", "baselines")] == [
            row[key] for key in ("deployed", "held_out", "accuracy", "baselines")
        ]
        assert losses(done.path, client) == pytest.approx(row["held_out"][row["deployed"]], abs=1e-5)
    assert (folders["fedit"] / "clients" / second / "adapter" / "adapter_model.safetensors").exists()
    # So is what was damaged: a changed digit would choose for a client, and half a file is no adapter.
    note, weights = (
        folders["local"] / "clients" / first / name for name in ("held_out.json", "adapter/adapter_model.safetensors")
    )
    before = note.read_bytes(), weights.read_bytes()
    note.write_bytes(before[0].replace(b'"loss": ', b'"loss": 9'))
    weights.write_bytes(before[1][: len(before[1]) // 2])
    run(CONFIG, out=tmp_path / "best", resume=True)
    assert (note.read_bytes(), weights.read_bytes()) == before
    # A client without a choice has no model by it, and not that of the run's own method in its place.
    for folder in folders.values():
        note = folder / "clients" / second / "held_out.json"
        write_sealed(note, {**read_sealed(note), "loss": None})
    shutil.rmtree(done.path / "deployed" / second)
    assert run(CONFIG, out=tmp_path / "best", resume=True).results["clients"][second]["deployed"] is None
    with pytest.raises(RunError, match=f"client {second} deploys none of its models"):
        export(done.path, second, tmp_path / "none")
    assert export(done.path, second, tmp_path / "fedit", method="fedit").exists()


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
    for label, loss in {"local": None, "fedit": 2.0, "feddpa": 2.0}.items():
        write_sealed(tmp_path / label / "held_out.json", {"alone": label == "local", "loss": loss, "examples": 4})
    folders = {label: tmp_path / label for label in ("local", "fedit", "feddpa", "potara")}  # one was not exported
    assert choose(folders, 0.1) == Choice("fedit", {"fedit": 2.0, "feddpa": 2.0})
    assert choose({"local": tmp_path / "local"}, 0.1) == Choice(None, {})


def test_a_client_that_deploys_nothing_has_no_numbers_of_another_model() -> None:
    spent = dict.fromkeys(("updates", "bytes_up", "bytes_down", "bytes_scoring", "seconds", "cpu_seconds"), 1)
    row = {"accuracy": 0.5, "macro_f1": 0.4, "examples": 10, "train_examples": 5, "each": [1.0, 0.0], **spent}
    runs = {label: {"clients": {"a": row, "b": row}, "summary": dict(spent)} for label in ("local", "fedit")}
    found = deployed_results(runs, "accuracy", {"a": Choice(None, {}), "b": Choice("fedit", {"fedit": 0.3})})
    nothing = found["clients"]["a"]
    assert nothing["accuracy"] is None and nothing["examples"] == 0 and nothing["train_examples"] == 5
    assert nothing["updates"] == 2 and not nothing.keys() & {"macro_f1", "each"}
    assert found["clients"]["b"]["macro_f1"] == 0.4


def test_what_is_trained_alone_gives_way_to_what_is_better_by_more_than_the_margin(tmp_path: Path) -> None:
    assert preferred({"local": 1.0, "fedit": 0.9}, ["local"], 0.1) == "local"
    assert preferred({"local": 1.0, "fedit": 0.9}, [], 0.1) == "fedit"
    assert preferred({"local": 1.0, "fedit": 0.9, "feddpa": 0.89}, ["local"], 0.1) == "feddpa"
    assert preferred({"local": 2.0, "long": 1.0, "fedit": 0.9}, ["local", "long"], 0.1) == "long"
    assert preferred({"local": 0.0, "fedit": 0.0}, ["local"], 0.1) == "local"
    sure = {**CONFIG, "federation": {**CONFIG["federation"], "deploy_margin": 0.9}}
    clients = run(sure, out=tmp_path).results["clients"]
    assert {row["deployed"] for row in clients.values()} == {"local"}
    assert all(min(row["held_out"].values()) > 0.1 * row["held_out"]["local"] for row in clients.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"federation": {"deploy_margin": 0.1}}, "has no effect without"),
        ({"baselines": ["feddpa"], "federation": {"deploy": "best", "deploy_margin": 0.1}}, "no method of the run"),
        ({"federation": {"deploy": "best", "deploy_margin": 1.0}}, "below 1"),
    ],
)
def test_a_margin_over_nothing_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        run({**CONFIG, **changes}, out=tmp_path / "run")


def test_memory_that_runs_out_over_an_adapter_ends_the_run_which_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no client is left without its model for good."""
    config = {**CONFIG, "baselines": [], "federation": {"rounds": 1}}
    deployment = LocalEngine.deployment

    def full(self: LocalEngine, client: str, *rest: Any) -> Any:
        if client == "site-01":
            raise MemoryError("out of memory")
        return deployment(self, client, *rest)

    monkeypatch.setattr(LocalEngine, "deployment", full)
    with pytest.raises(MemoryError):
        run(config, out=tmp_path / "run")
    monkeypatch.setattr(LocalEngine, "deployment", deployment)
    done = run(config, out=tmp_path / "run", resume=True)
    assert all((done.path / row["adapter"]).is_dir() for row in done.results["clients"].values())
