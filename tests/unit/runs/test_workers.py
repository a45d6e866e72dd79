"""Which GPU each worker process takes, and what it cannot know."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.protocol.registry import get_method
from befit.runs.runner import run
from befit.runs.workers import PipeEnd, gpu_of, take_gpu


def test_workers_take_turns_with_the_gpus() -> None:
    assert [gpu_of(worker, 3) for worker in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [gpu_of(worker, 1) for worker in range(3)] == [0, 0, 0]
    assert [gpu_of(worker, 0) for worker in range(3)] == [None, None, None]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ([], [2]),
        (["model.device=cuda"], [2]),
        (["model.device=cpu"], []),
        (["model.device=cuda:1"], []),
        (["model.device=cpu", "common_model={id: digits-vit, device: cuda}"], [2]),
        (["model.device=cpu", "families={big: {clients: [client-00], model: {id: digits-vit, device: auto}}}"], [2]),
    ],
)
def test_only_where_the_configuration_leaves_it_open(
    changes: list[str], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four GPUs, as far as torch says here; families and the common model count too."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    take_gpu(6, load_experiment({"benchmark": "digits", "method": "fedit"}, changes).devices)
    assert seen == taken


def test_a_message_that_cannot_be_sent_whole_leaves_nothing_in_the_pipe() -> None:
    """Its header alone would wait there for arrays that never come."""
    ours, theirs = Pipe()
    with pytest.raises(RuntimeError):
        PipeEnd(ours).send({"do": "score"}, dict.fromkeys("ab", torch.zeros(2)))  # no file holds one array twice
    assert not theirs.poll()


def test_a_method_of_a_script_is_refused_before_a_run_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would not know it."""
    monkeypatch.setattr(get_method("fedit").factory, "__module__", "__main__")
    settings = {"benchmark": "digits", "method": "fedit", "baselines": [], "engine": {"workers": 2}}
    with pytest.raises(ConfigError, match=r"engine\.workers: fedit was registered in this process alone"):
        run(settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
