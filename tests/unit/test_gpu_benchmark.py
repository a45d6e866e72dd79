"""benchmarks/gpu.py on whatever device there is: it is meant for machines that run no tests."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_a_trial_measures_every_part_and_publishes_nothing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "publish", lambda *_: pytest.fail("a trial was published"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small"])
    script.main()
    found = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert [one["way"] for one in found["round"]] == list(script.WAYS)
    assert all(one["step_s"]["median"] > 0 and one["peak_mib"] > 0 for one in found["round"])
    assert found["suite"]["seconds"] > 0 and 0 < found["suite"]["mean"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_published(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "publish", lambda *_: pytest.fail("nothing was measured"))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="There is no GPU here"):
        script.main()
