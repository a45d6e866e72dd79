"""benchmarks/attacks.py on one round of one step: runs without the attackers, and what is kept between runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found: Any = importlib.import_module("attacks")
    monkeypatch.setattr(found, "ROUNDS", 1)
    monkeypatch.setattr(found, "STEPS", 1)
    monkeypatch.setattr(found, "_LOCAL", {})
    found.host_of.cache_clear()
    yield found
    found.host_of.cache_clear()


def test_a_run_without_the_attackers_is_played_to_its_end(script: Any) -> None:
    absent = script.play(script.Setting("potara", 5, script.ABSENT, "guard", 0))
    assert absent.keys() == {"potara", "fedit"} and all(0 < row["accuracy"] < 1 for row in absent.values())


def test_runs_that_go_on_from_what_another_trained_are_those_that_trained_it_themselves(script: Any) -> None:
    """Potara's local branch is kept from the first run with everybody, whichever run comes first."""
    runs = [script.Setting("potara", 5, attack, "clip", 0) for attack in (script.ABSENT, script.HONEST, "x-10")]
    kept = [script.play(run) for run in runs]
    ((_, memories),) = script._LOCAL.values()
    assert len(memories) == 5
    for run, before in zip(reversed(runs), reversed(kept), strict=True):
        script._LOCAL.clear()
        assert script.play(run) == before
