"""Which settings a resumed run may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment, load_experiment, to_dict, to_yaml
from befit.core.errors import RunError
from befit.core.storage import atomic_write
from befit.runs.provenance import check_directory, result_affecting, settings_hash

SETTINGS: dict[str, Any] = {"benchmark": "digits", "method": "fedit", "federation": {"rounds": 2}}


@pytest.mark.parametrize(
    "change",
    [
        "engine.wait_s=5",
        "engine.deadline_s=9",
        "engine.keys={client-00: keys/north.pub}",
        "engine.spool_mib=1",
        "name=x",
    ],
)
def test_how_long_is_waited_and_for_whom_may_change(change: str, tmp_path: Path) -> None:
    flower = {**SETTINGS, "engine": {"kind": "flower", "keys": {"client-00": "keys/south.pub"}}}
    before, after = load_experiment(flower), load_experiment(flower, [change])
    assert settings_hash(before) == settings_hash(after)
    atomic_write(tmp_path / "config.yaml", _yaml(before))
    check_directory(tmp_path, after, resume=True)


@pytest.mark.parametrize("change", ["engine.workers=2", "engine.store=disk", "train.lr=0.5", "guard.clip=2.0"])
def test_what_decides_numbers_or_files_may_not(change: str, tmp_path: Path) -> None:
    before, after = load_experiment(SETTINGS), load_experiment(SETTINGS, [change])
    assert settings_hash(before) != settings_hash(after)
    atomic_write(tmp_path / "config.yaml", _yaml(before))
    with pytest.raises(RunError, match=f"{change.partition('.')[0]} differ"):
        check_directory(tmp_path, after, resume=True)


def test_nothing_of_the_engine_but_waiting_is_left_out() -> None:
    kept = result_affecting(to_dict(load_experiment(SETTINGS)))["engine"]
    assert set(kept) == {"kind", "workers", "fleet", "store", "serialise", "threads"}


def _yaml(experiment: Experiment) -> bytes:
    return to_yaml(experiment).encode()
