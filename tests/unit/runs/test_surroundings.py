"""What a run does not take over from its surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.runs.runner import run


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("around", ["no_grad", "inference_mode", "bfloat16 by itself", "float64"])
def test_what_torch_is_set_to_around_a_run_does_not_reach_it(around: str, tmp_path: Path) -> None:
    settings = {
        "benchmark": {"name": "digits", "clients": 2},
        "limit": {"records": 20},
        "method": {"name": "fedit", "rank": 2},
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }
    contexts: dict[str, AbstractContextManager[Any]] = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "bfloat16 by itself": torch.autocast("cpu", torch.bfloat16),
        "float64": default_dtype(torch.float64),
    }
    plain = run(settings, out=tmp_path / "plain").path
    with contexts[around]:
        inside = run(settings, out=tmp_path / "inside").path
    for client in ("client-00", "client-01"):
        file = Path("clients") / client / "deployment.safetensors"
        assert (plain / file).read_bytes() == (inside / file).read_bytes()
