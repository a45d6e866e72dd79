"""Clients that never took part, or whose training failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.core.errors import NotEnoughReplies
from befit.core.values import REFUSED, ClientInfo, Cost, Failure, Payload, Tick, Update
from befit.flower.engine import RemoteMemories
from befit.protocol.engine import Checkpoint
from befit.runs.directory import RunDirectory
from befit.runs.journal import RunJournal, untrained_text
from befit.runs.runner import run


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_clients_that_were_never_trained_are_one_line_and_no_traceback(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning of the score and one of the export, however many they are; their failures stay in the results."""
    config = {
        "name": "untrained",
        "benchmark": {"name": "digits", "clients": 4, "alpha": 10.0},
        "limit": {"records": 24},
        "method": "ditto",
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 1, "cohort": 1},
        "engine": {"workers": workers},
        "report": {"plots": False},
    }
    done = run(config, out=tmp_path / "run")
    lines = [record.getMessage() for record in caplog.records if "not trained" in record.getMessage()]
    assert [line.rpartition(";")[0] for line in lines] == [
        "3 clients were not trained in this run and have no score",
        "3 clients were not trained in this run and have no adapter",
    ]
    assert "Traceback" not in caplog.text
    untrained = {failure["client"] for failure in done.results["failures"]}  # type: ignore[typeddict-item]
    assert len(untrained) == 3
    for client in untrained:  # what came to them in vain was to score, and no training
        row: dict[str, Any] = done.results["clients"][client]  # type: ignore[assignment]
        assert row["bytes_down"] == row["bytes_up"] == row["seconds"] == 0 and row["bytes_scoring"] > 0


def test_each_round_tells_of_its_own_untrained_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path)
    journal = RunJournal(directory, RemoteMemories(), "untrained", None)
    for round_, clients in ((1, ["a", "b"]), (2, ["b"]), (3, [])):
        for client in clients:
            journal.failed(Failure(client, "federate", round_, "NotTrained", "no adapter"))
        journal.completed(Checkpoint(0, round_, Payload()), force=False)
    directory.close()
    assert caplog.messages == [untrained_text(clients, "score") for clients in (["a", "b"], ["b"])]


def test_a_reason_that_stays_the_same_is_told_once_and_listed_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Again where a reply came between, or it is another one."""
    directory = RunDirectory(tmp_path)
    journal = RunJournal(directory, RemoteMemories(), "refused", None)
    for round_, reason in enumerate(["no", "no", "", "no", "never"], 1):
        at = Tick("federate", round_, 5, 0)
        if reason:
            journal.failed(Failure("a", "federate", round_, "left out", reason))
        else:
            journal.trained(at, Update(ClientInfo("a", "b", 1), Payload(), {}, Cost()))
    journal.failed(Failure("a", "federate", 5, "left out", "never"), scoring=True)
    assert [line["reason"] for line in directory.read("metrics") if line["kind"] == "failure"] == [
        *("no", "no", "no", "never", "never")
    ]
    directory.close()
    assert [line.partition("round ")[2] for line in caplog.messages] == [
        *("1: left out: no", "4: left out: no", "5: left out: never", "5: left out: never")
    ]


def test_training_that_diverges_is_a_sentence_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "name": "diverged",
        "benchmark": {"name": "digits", "clients": 2, "alpha": 10.0},
        "limit": {"records": 24},
        "method": "fedit",
        "baselines": [],
        "train": {"max_steps": 3, "lr": 1e30},
        "federation": {"rounds": 1},
    }
    with pytest.raises(NotEnoughReplies, match="usable reply"):
        run(config, out=tmp_path / "run")
    assert "client client-00, stage federate, round 1: TrainingDiverged: the loss" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_client_or_newcomer_that_has_no_such_metric_costs_nobody_else_a_score(tmp_path: Path) -> None:
    """All test records of c and of the newcomer are of one class, of which there is no area under a curve."""
    sites = {"a": 2, "b": 2, "c": 1, "late": 1}
    for site, classes in sites.items():
        for split, count in (("train", 8), ("test", 8)):
            records = [
                {"text": f"{site} {split} {at}", "label": "gb"[at % (2 if split == "train" else classes)]}
                for at in range(count)
            ]
            (tmp_path / site).mkdir(exist_ok=True)
            (tmp_path / site / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = {
        "model": {"id": "names-bert-mlm", "max_length": 16},
        "data": {
            "task": "text-classification",
            "clients": {site: str(tmp_path / site) for site in "abc"},
            "newcomers": {"late": str(tmp_path / "late")},
        },
        "method": {"name": "fedit", "rank": 2},
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 1},
        "evaluate": {"metrics": ["auroc"], "others": "end"},
        "report": {"plots": False},
    }
    done = run(config, out=tmp_path / "run")
    rows: dict[str, Any] = dict(done.results["clients"])
    assert rows["a"]["auroc"] is not None and rows["b"]["auroc"] is not None and rows["c"]["auroc"] is None
    assert set(rows["a"]["on_others"]) == {"b"} and set(rows["b"]["on_others"]) == {"a"}
    late = done.results["newcomers"]["clients"]["late"]
    assert late["auroc"] is None and "needs two classes" in late["reason"]


def test_a_reply_that_is_refused_after_it_was_taken_is_listed_once(tmp_path: Path) -> None:
    """As one that the guard finds unusual beside the others; of one that was refused at once there is its size."""
    directory = RunDirectory(tmp_path)
    journal = RunJournal(directory, RemoteMemories(), "refused", None)
    sent = Payload({"shared/layer/A": torch.ones(2, 3)})
    journal.accepted(Tick("federate", 1, 2, 0), Update(ClientInfo("a", "model", 4), sent))
    for client in "ab":
        journal.failed(Failure(client, "federate", 1, REFUSED, "unusual", cost=Cost(bytes_up=100)))
    journal.failed(Failure("a", "federate", 2, REFUSED, "no frame", cost=Cost(bytes_up=70)))
    keys = Update(ClientInfo("c", "model", 4), Payload({}, {"keys": ["one"]}))
    journal.accepted(Tick("federate", 1, 2, 0), keys, step=True)
    journal.failed(Failure("c", "federate", 1, REFUSED, "undeclared", cost=Cost(bytes_up=90)))
    directory.close()
    listed = journal.outbound.as_dict()
    assert [(row["name"], row["bytes"]) for row in listed["b"]] == [("refused reply", 100)]
    of_c = {row["name"]: row["bytes"] for row in listed["c"]}
    assert "keys" in of_c and of_c["refused reply"] == 90  # a step of a secure sum is another reply
    assert ("shared/layer/A", 24) in [(row["name"], row["bytes"]) for row in listed["a"]]
    assert [row["bytes"] for row in listed["a"] if row["name"] == "refused reply"] == [70]
