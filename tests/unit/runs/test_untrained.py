"""Clients that never took part, or whose training failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from befit.core.errors import NotEnoughReplies
from befit.core.values import Failure, Payload
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
    assert len({failure["client"] for failure in done.results["failures"]}) == 3  # type: ignore[typeddict-item]


def test_each_round_tells_of_its_own_untrained_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path)
    journal = RunJournal(directory, RemoteMemories(), "untrained", None)
    for round_, clients in ((1, ["a", "b"]), (2, ["b"]), (3, [])):
        for client in clients:
            journal.failed(Failure(client, "federate", round_, "NotTrained", "no adapter"))
        journal.completed(Checkpoint(0, round_, Payload()), force=False)
    directory.close()
    assert caplog.messages == [untrained_text(clients, "score") for clients in (["a", "b"], ["b"])]


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
