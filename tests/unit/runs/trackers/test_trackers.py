"""Trackers: what is sent of a round, once and in order, read back with TensorBoard's own reader."""

import importlib.util
import json
import logging

import pytest

import befit
from befit.config.experiment import TRACKERS
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.runs.trackers import Follower, check_trackers
from befit.runs.trackers.follow import round_values, tracked


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.rounds, self.closed = [], False

    def log(self, step, values):
        self.rounds.append((step, dict(values)))

    def close(self):
        self.closed = True


def score(client, value, metric="accuracy"):
    return {
        "kind": "score",
        "stage": "federate",
        "round": 1,
        "client": client,
        "split": "test",
        "metric": metric,
        "value": value,
        "examples": 5,
    }


def train(client, loss, number=1):
    return {"kind": "train", "stage": "federate", "round": number, "client": client, "loss": loss, "steps": 2}


def test_a_round_is_means_over_clients_the_worst_and_every_client():
    """Losses 1 and 3 have the mean 2; scores 0.5 and 0.9 the mean 0.7, and 0.5 is the worst."""
    values = round_values([train("a", 1.0), train("b", 3.0), score("a", 0.5), score("b", 0.9)])
    assert values["federate/train/loss"] == 2.0
    assert values["federate/test/accuracy"] == pytest.approx(0.7) and values["federate/test/accuracy/worst"] == 0.5
    assert values["federate/clients/b/accuracy"] == 0.9 and "federate/train/loss/worst" not in values


def test_failures_are_counted_and_numbers_that_are_none_are_left_out():
    failure = {"kind": "failure", "stage": "federate", "round": 1, "client": "a", "error": "E", "reason": "x"}
    diagnostic = {"kind": "diagnostic", "stage": "federate", "round": 1, "client": "a", "name": "weight", "value": 0.25}
    values = round_values([failure, failure, {**failure, "scoring": True}, train("a", None), diagnostic])
    assert values == {"federate/failures": 2.0, "federate/unscored": 1.0, "federate/diagnostic/weight": 0.25}


def test_of_many_clients_only_the_mean_and_the_worst_are_sent():
    values = round_values([score(f"c{number}", 0.5) for number in range(51)])
    assert set(values) == {"federate/test/accuracy", "federate/test/accuracy/worst"}


def test_a_round_is_sent_once_and_only_when_it_is_complete(tmp_path):
    path, kept = tmp_path / "metrics.jsonl", Kept()
    follower = Follower(path, {"kept": lambda: kept})
    follower.poll()  # there is no file yet
    first, half = json.dumps(train("a", 1.0)) + "\n", json.dumps(train("b", 3.0)) + "\n"
    path.write_text(first + half[:20])
    follower.poll()
    path.write_text(first + half)
    follower.poll()
    assert kept.rounds == []
    path.write_text(first + half + json.dumps(train("a", 5.0, number=2)) + "\n")
    follower.poll()
    assert kept.rounds == [(1, {"federate/train/loss": 2.0})]
    follower.close()
    assert kept.rounds[1:] == [(2, {"federate/train/loss": 5.0})] and kept.closed


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path, caplog):
    class Broken(Kept):
        def log(self, step, values):
            raise ConnectionError("no route")

    path, kept = tmp_path / "metrics.jsonl", Kept()
    path.write_text("".join(json.dumps(train("a", 1.0, number=number)) + "\n" for number in (1, 2, 3)))
    with caplog.at_level(logging.WARNING):
        Follower(path, {"broken": Broken, "kept": lambda: kept}).close()
    assert len(kept.rounds) == 3 and caplog.text.count("broken takes no more numbers") == 1
    assert "ConnectionError: no route" in caplog.text


def test_a_tracker_that_cannot_be_opened_is_left_out_like_one_that_fails(tmp_path, caplog):
    def closed():
        raise ConnectionError("no server")

    path, kept = tmp_path / "metrics.jsonl", Kept()
    path.write_text(json.dumps(train("a", 1.0)) + "\n")
    Follower(path, {"closed": closed, "kept": lambda: kept}).close()
    assert len(kept.rounds) == 1 and "closed takes no more numbers of this run: ConnectionError" in caplog.text


def test_unknown_trackers_and_missing_libraries_are_refused(monkeypatch):
    base = {"benchmark": "digits", "method": "fedit"}
    with pytest.raises(
        ConfigError, match=r'trackers: must be a list of tensorboard, wandb, mlflow, got \["tensorbord"\]'
    ):
        load_experiment({**base, "trackers": ["tensorbord"]})
    with pytest.raises(ConfigError, match="trackers: must be a list of texts"):
        load_experiment({**base, "trackers": "tensorboard"})
    monkeypatch.setattr("befit.runs.trackers.base.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(["wandb", "mlflow"])
    assert len(caught.value.problems) == 2 and "pip install '.[wandb]' in the clone" in str(caught.value)
    with pytest.raises(ConfigError, match=r"'\.\[mlflow\]'"):  # before anything is loaded or trained
        befit.run({**base, "trackers": ["mlflow"]})


def test_without_trackers_the_observer_is_the_callers_own(tmp_path):
    def observer(event):
        pass

    with tracked([], tmp_path, "fedit", {}, observer) as seen:
        assert seen is observer


CONFIG = {
    "name": "tracked",
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "limit": {"records": 24},
    "method": "fedit",
    "baselines": ["local"],
    "train": {"max_steps": 1, "batch_size": 4},
    "federation": {"rounds": 3},
    "evaluate": {"every": 1},
    "report": {"plots": False},
}


def test_tensorboard_has_every_round_of_the_method_and_its_baseline(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = befit.run({**CONFIG, "trackers": ["tensorboard"]}, out=tmp_path / "run")
    for label, folder in (("fedit", result.path), ("local", result.path / "baselines" / "local")):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        reader = EventAccumulator(str(result.path / "tensorboard" / label))
        reader.Reload()
        stage = lines[0]["stage"]
        scalars = reader.Scalars(f"{stage}/train/loss")
        assert [one.step for one in scalars] == [1, 2, 3]
        for one in scalars:
            losses = [line["loss"] for line in lines if line["kind"] == "train" and line["round"] == one.step]
            assert one.value == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert len(reader.Scalars(f"{stage}/test/accuracy/worst")) == 3
    again = befit.run({**CONFIG, "trackers": ["tensorboard"]}, out=tmp_path / "run", resume=True)
    assert again.results == result.results
    befit.run(CONFIG, out=tmp_path / "plain")  # trackers decide no number
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (result.path / "metrics.jsonl").read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_has_every_round_and_the_settings(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    befit.run({**CONFIG, "baselines": [], "trackers": ["mlflow"]}, out=tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("befit").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.max_steps"] == "1"
    stage = next(name for name in run.data.metrics if name.endswith("/train/loss"))
    assert [one.step for one in client.get_metric_history(run.info.run_id, stage)] == [1, 2, 3]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_takes_a_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    befit.run({**CONFIG, "baselines": [], "trackers": ["wandb"]}, out=tmp_path / "run")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_every_tracker_has_an_extra_of_its_name():
    from pathlib import Path

    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert all(f'\n{name} = ["' in text for name in TRACKERS)


def test_rows_of_clients_for_clients_are_not_followed() -> None:
    where = {"stage": "federate", "round": 1, "client": "a"}
    rows = [{"kind": kind, **where, "values": {"a": 0.0, "b": 1.0}} for kind in ("others", "weights")]
    assert round_values([*rows, {"kind": "diagnostic", **where, "name": "w", "value": 0.5}]) == {
        "federate/diagnostic/w": 0.5
    }
