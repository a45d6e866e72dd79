"""Several processes give the numbers of one, and what happens when one of them goes.

Each worker takes seconds to start, so those are forked whose start is not looked at, and one configuration has all that
is otherwise in several processes than in one: two backbones, data that arrives over time, scores of others' examples,
of single ones and confusions.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from befit.config.load import load_experiment
from befit.core.errors import RunError
from befit.protocol.registry import METHODS
from befit.runs import workers
from befit.runs.host import Host
from befit.runs.processes import MultiprocessEngine
from befit.runs.runner import run
from befit.train import loop
from tests.processes import PATIENCE, fork_workers

NOTING = """
from befit.train import loop

train_together = loop.train_together


def noted(requests, *rest):
    with open({sizes!r}, "a") as file:
        print(len(requests), file=file)
    return train_together(requests, *rest)


loop.train_together = noted
"""


def config(workers: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": "processes",
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "limit": {"records": 40},
        "families": {"other": {"clients": ["client-02"], "model": {"id": "digits-vit-augmented"}}},
        "stream": {"kind": "dynamic"},
        "method": "potara",
        "baselines": [],
        "train": {"max_steps": 2},
        "federation": {"rounds": 3, "patience": 9},
        "report": {"plots": False},
        "evaluate": {"every": 1, "others": "end"},
        "engine": {"workers": workers},
        "checkpoint": {"every_s": 0},
        **changes,
    }


def traces(path: Path) -> dict[str, Any]:
    names = ["metrics.jsonl", "outbound.json"]
    names += [str(p.relative_to(path)) for p in path.rglob("deployment.safetensors")]
    rows = json.loads((path / "results.json").read_text())["clients"]
    scores = {
        client: {key: row.get(key) for key in ("accuracy", "each", "confusion", "on_others", "family")}
        for client, row in rows.items()
    }
    return {"scores": scores, **{name: (path / name).read_bytes() for name in sorted(names)}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return traces(run(config(1), out=tmp_path_factory.mktemp("alone") / "run").path)


def test_fleets_in_two_processes_give_the_numbers_of_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding; each worker trains its two clients at once, as a plugin notes, which workers import too."""
    fork_workers(monkeypatch)
    monkeypatch.setattr(loop, "train_together", loop.train_together)  # so that it is put back
    sizes, plugin = tmp_path / "sizes", tmp_path / "noting.py"
    plugin.write_text(NOTING.format(sizes=str(sizes)))
    common: dict[str, Any] = {
        "families": {},
        "stream": {"kind": "none"},
        "benchmark": {"name": "digits", "clients": 4, "alpha": 10.0},
        "method": "ditto",
        "train": {"max_steps": 2, "optimiser": "sgd", "lr": 5e-2},
        "plugins": [str(plugin)],
    }
    engines: tuple[dict[str, int], ...] = ({"workers": 1, "fleet": 1}, {"workers": 2, "fleet": 2})
    paths = [run(config(2, **common, engine=engine), out=tmp_path / str(engine["fleet"])).path for engine in engines]
    alone, together = ([load_file(file) for file in sorted(path.rglob("deployment.safetensors"))] for path in paths)
    assert len(alone) == 4
    for here, there in zip(alone, together, strict=True):
        for key, value in here.items():
            assert float((value - there[key]).norm()) <= 1e-4 * float(value.norm()), key
    assert sizes.read_text().split() == ["2"] * 2 * 3  # by each worker in each round
    ledgers = [[json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()] for path in paths]
    counted = [[(line["client"], line["bytes_up"], line["bytes_down"]) for line in ledger] for ledger in ledgers]
    assert counted[0] == counted[1]


def test_a_killed_worker_ends_the_run_and_it_resumes_also_without_a_memory_that_was_saved(
    alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that is killed has started by its command. The checkpoint before takes the place of the one that names
    a memory which a worker does not find: none is made anew. The end is that of one process to the bit."""
    settings, rounds = config(2, engine={"workers": 2, "store": "disk"}), 0

    def kill_one(event: dict[str, Any]) -> None:
        nonlocal rounds
        rounds += event["kind"] == "round" and event["run"] == "potara"
        if rounds == 4:
            rounds += 1
            os.kill(children()[0], signal.SIGKILL)

    started = fork_workers(monkeypatch, but=1)
    with pytest.raises(RunError, match=r"a worker process ended .*--resume"):
        run(settings, out=tmp_path / "run", observer=kill_one)
    assert children() == [] and len(started) == 1 and started[0].wait(PATIENCE) is not None
    saved = json.loads((tmp_path / "run" / "checkpoint.json").read_text())
    next(tmp_path.rglob(saved["clients"]["client-01"])).unlink()
    fork_workers(monkeypatch)
    assert traces(run(settings, out=tmp_path / "run", resume=True).path) == alone


def children() -> list[int]:
    """Processes of this one that still run."""
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    alive = [int(pid) for pid in text.split()]
    return [pid for pid in alive if b"befit.runs.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_data_that_only_this_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, settings = fork_workers(monkeypatch), load_experiment(config(1))
    first, *others = Host(settings).infos
    infos = [replace(first, num_examples=first.num_examples + 1), *others]
    with pytest.raises(RunError, match=r"engine\.workers: 1"):
        MultiprocessEngine(settings, settings.method, infos, tmp_path, 1)
    assert len(started) == 1 and started[0].wait(PATIENCE) is not None  # it is not left behind


def test_workers_that_have_started_end_where_a_later_one_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, settings = fork_workers(monkeypatch), load_experiment(config(1))
    start = workers.subprocess.Popen

    def one(*arguments: Any, **options: Any) -> Any:
        if started:
            raise OSError("no more processes")
        return start(*arguments, **options)

    monkeypatch.setattr(workers.subprocess, "Popen", one)
    with pytest.raises(OSError, match="no more processes"):
        MultiprocessEngine(settings, settings.method, Host(settings).infos, tmp_path, 2)
    assert len(started) == 1 and started[0].wait(0) is not None  # it has been waited for


BROKEN = """
import befit
from befit.core.errors import NotFinite, NotTrained

ERRORS = {"client-00": NotFinite, "client-01": FloatingPointError, "client-02": NotTrained}


class Alone(befit.Personal):
    def client_update(self, client, received, site, at):
        return client, befit.Payload()


@befit.register("broken", title="Broken")
class Broken(befit.Method):
    use = befit.Use(("shared",))

    def __init__(self, rank: int = 2):
        self.layout = befit.lora(rank, 4.0)

    def plan(self):
        return [befit.Stage("alone", Alone(), rounds=1)]

    def server_init(self, site):
        return befit.Payload()

    def deploy(self, client, received, site):
        raise ERRORS[site.info.id]("what it says")
"""


def test_a_client_without_an_adapter_is_told_alike_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the kinds of errors, by which a study knows a training that has diverged."""
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN)
    fork_workers(monkeypatch)
    told = []
    try:
        for count in (1, 2):
            caplog.clear()
            settings = config(count, method="broken", plugins=[str(plugin)], families={}, federation={"rounds": 1})
            failures = run(settings, out=tmp_path / str(count)).results["failures"]
            exported = [each for each in failures if each["stage"] == "export"]
            told.append((exported, [line for line in caplog.messages if "adapter" in line]))
    finally:
        METHODS.pop("broken", None)
    assert told[0] == told[1]
    assert [each["kind"] for each in told[0][0]] == ["NotFinite", "FloatingPointError", "NotTrained"]
