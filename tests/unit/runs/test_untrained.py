"""Clients that never took part."""

from __future__ import annotations

from pathlib import Path

import pytest

from befit.runs.runner import run


def test_clients_that_were_never_trained_are_one_line_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning of the score and one of the export, however many they are; their failures stay in the results."""
    config = {
        "name": "untrained",
        "benchmark": {"name": "digits", "clients": 4, "alpha": 10.0},
        "method": "ditto",
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 1, "cohort": 1},
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
