"""What only a GPU can show: steps as CUDA graphs, fleets on a device, and runs whose numbers are those of a CPU.

`make test-gpu` runs these, and the parts of the contract that a device could break.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.layout import Layout
from befit.adapters.model import AdaptedModel
from befit.config.load import load_experiment
from befit.protocol.jobs import random_state
from befit.protocol.site import Site
from befit.runs.host import Host
from befit.runs.runner import run
from befit.train import fleet, replay
from befit.train.loop import training
from tests.contract.conftest import _played, experiment, once, play  # noqa: F401 fixtures
from tests.contract.test_fleets import (
    test_clients_that_train_as_one_come_to_what_they_come_to_alone,  # noqa: F401 run here
)
from tests.contract.test_methods import (
    test_however_a_run_is_carried_out_its_numbers_are_the_same_bit_for_bit,  # noqa: F401 run here
)
from tests.tiny import make_site, tiny_model
from tests.tiny import random_state as random_arrays
from tests.unit.train.test_replay import AT, BOTH, BUDGET, OWN, SHARED, assert_equal
from tests.unit.train.test_replay import play as in_turn

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default"),  # of the versions that a machine with a GPU has
]
CHANGES = {"train": {"max_steps": 2, "lr": 5e-2, "optimiser": "sgd", "momentum": 0.9, "grad_clip": 0.5}}


@pytest.fixture(autouse=True)
def draws_differ(request: pytest.FixtureRequest) -> None:
    if "base with dropout" in request.node.name:
        pytest.skip("a fleet draws other numbers on a GPU than a client alone")


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Host:
    """Of the contract, on the GPU. Without dropout: a fleet draws other numbers there than a client alone."""
    found = Host(load_experiment(experiment(**CHANGES, model={"id": _half(), "device": "cuda"})))
    assert found.model.device.type == "cuda"
    return found


def _half() -> str:
    from tests.backbones import short_vit

    return short_vit()


def on_gpu(
    kind: str,
    layout: Layout | None = None,
    attention: str = "sdpa",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Site:
    backbone: Any = tiny_model(kind).to(CUDA, dtype)
    backbone.set_attn_implementation(attention)
    native = dtype != torch.float32
    model = AdaptedModel(backbone, head=kind in ("vit", "bert"), dropout=dropout, native=native)
    made = make_site(kind, layout, model=model, budget=replace(BUDGET, max_steps=8, **settings))
    made.task.max_length = 16  # of the tiny models
    return made


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A row for each graph that was captured, from now on."""
    found: list[str] = []
    real = replay.CudaGraphs.capture

    def noted(self: replay.CudaGraphs, work: Any) -> Any:
        again = real(self, work)
        found.append("captured")
        return again

    monkeypatch.setattr(replay.CudaGraphs, "capture", noted)
    monkeypatch.setattr(replay, "_STEPS", type(replay._STEPS)())
    monkeypatch.setattr(replay, "_TOLD", set())
    yield found


def as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "recorder", lambda device: None)


def near(first: Sequence[Any], second: Sequence[Any], of: float) -> None:
    for (arrays, report), (others, other) in zip(first, second, strict=True):
        assert float((arrays - others).norm()) <= of * float(others.norm())
        assert report.losses == pytest.approx(other.losses, rel=of)


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["vit", "bert", "llama", "gpt2"])
def test_replayed_steps_come_to_what_steps_as_usual_come_to(
    kind: str, optimiser: str, captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients in turn, with averages that they keep. But for rounding, of the optimiser's rate and of widened
    texts."""
    site = on_gpu(kind, BOTH, optimiser=optimiser, momentum=0.5)
    replayed = in_turn(site, [SHARED, OWN])
    assert len(captures) >= 2, replay._TOLD
    as_usual(monkeypatch)
    near(replayed, in_turn(site, [SHARED, OWN]), 1e-4 if optimiser == "adamw" else 1e-5)


def test_dropout_draws_the_same_numbers_in_a_replay(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    site = on_gpu("vit", BOTH, dropout=0.25, optimiser="sgd")
    replayed = in_turn(site, [SHARED, OWN])
    assert captures
    as_usual(monkeypatch)
    near(replayed, in_turn(site, [SHARED, OWN]), 1e-5)


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_no_number_depends_on_who_trained_before(kind: str, captures: list[str]) -> None:
    """To the bit: the first client after a crash captures, and others replay what was captured before."""
    site = on_gpu(kind, BOTH, dropout=0.25, optimiser="adamw")
    first = in_turn(site, [SHARED, OWN])
    (of_model,) = replay._STEPS.values()
    of_model.clear()
    again = in_turn(site, [SHARED, OWN], memories=[report.memory for _, report in first[:2]], rounds=(2,))
    assert captures
    assert_equal(first[2:], again)


def test_a_capture_that_fails_halfway_leaves_nothing_behind(
    captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention makes its mask from a number on the CPU, which shows in the capture alone."""
    site = on_gpu("vit", BOTH, attention="eager", dropout=0.25, optimiser="sgd")
    tried = in_turn(site, [SHARED, OWN])
    assert not captures and len(replay._TOLD) == 1
    as_usual(monkeypatch)
    near(tried, in_turn(site, [SHARED, OWN]), 1e-5)
    monkeypatch.undo()
    near(in_turn(on_gpu("bert", BOTH), [SHARED]), in_turn(on_gpu("bert", BOTH), [SHARED]), 1e-6)  # captures again


def test_steps_in_bfloat16_are_captured_too(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    site = on_gpu("llama", BOTH, dtype=torch.bfloat16, optimiser="sgd")
    replayed = in_turn(site, [SHARED])
    assert captures, replay._TOLD
    as_usual(monkeypatch)
    near(replayed, in_turn(site, [SHARED]), 1e-2)


def waits_of(work: Any) -> int:
    """How often it waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_more_steps_wait_no_more_often(kind: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    site, found = on_gpu(kind), []
    if not together:
        as_usual(monkeypatch)
    for steps in (2, 3, 9):  # the first one sets up
        asked, starts, draws = requests(site, 3 if together else 1, steps)
        work = (lambda a=asked, s=starts, d=draws: fleet.at_once(a, s, d)) if together else asked[0].alone
        found.append(waits_of(work))
    assert found[1] == found[2]


def requests(site: Site, clients: int, steps: int = 8) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """The same training by so many clients, from arrays of their own."""
    asked, starts, draws = [], [], []
    for client in range(clients):
        one = replace(site, info=replace(site.info, id=f"client-{client}"))
        one.model.load(random_arrays(one.model, seed=client))
        starts.append(one.model.snapshot())
        draws.append(random_state(one.model.device))
        asked.append(next(training(one, [SHARED], AT, steps=steps)))
    return asked, starts, draws


@pytest.mark.parametrize("kind", ["vit", "bert", "llama", "gpt2"])
def test_a_fleet_is_halved_where_the_device_has_no_memory_and_comes_to_what_clients_come_to_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, real = on_gpu(kind, optimiser="sgd"), fleet.at_once
    sizes: list[int] = []

    def tight(asked: Any, *others: Any) -> Any:
        sizes.append(len(asked))
        if len(asked) > 2:
            torch.empty(2**42, device=CUDA)
        return real(asked, *others)

    monkeypatch.setattr(fleet, "at_once", tight)
    try:
        ended = fleet.train_together(*requests(site, 5))
        assert sizes[0] == 5 and max(sizes[1:]) == 3 and fleet.most_at_once() == 2
    finally:
        fleet.forget_most()
    as_usual(monkeypatch)
    for (report, after, _), asked, start in zip(ended, *requests(site, 5)[:2], strict=True):
        assert not isinstance(report, Exception)
        site.model.fill(start)
        alone = asked.alone()
        assert float((after - site.model.snapshot()).norm()) <= 1e-5 * float(after.norm())
        assert report.losses == pytest.approx(alone.losses, rel=1e-5)


def results(method: str, tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    changes = {**CHANGES, "model": {"id": _half(), "device": "cuda"}, **changes}
    return run(load_experiment(experiment(method, **changes)), out=tmp_path / name).results


@pytest.mark.parametrize("method", ["fedit", "ditto", "potara", "rela"])
def test_a_run_comes_to_what_it_comes_to_on_a_cpu(method: str, tmp_path: Path) -> None:
    gpu, cpu = (
        results(method, tmp_path, device, model={"id": _half(), "device": device})["clients"]
        for device in ("cuda", "cpu")
    )
    assert gpu.keys() == cpu.keys()
    for client, row in cpu.items():
        assert gpu[client]["accuracy"] == pytest.approx(row["accuracy"], abs=0.1)
        assert gpu[client]["loss"] == pytest.approx(row["loss"], rel=1e-2)
        assert gpu[client]["bytes_up"] == row["bytes_up"]


def test_two_processes_share_a_gpu_and_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = (results("fedit", tmp_path, f"of-{count}", engine={"workers": count})["clients"] for count in (1, 2))
    assert {client: row["loss"] for client, row in one.items()} == {client: row["loss"] for client, row in two.items()}


def test_answers_are_those_of_a_cpu(tmp_path: Path) -> None:
    """Of a language model that writes: cache, lengths and ends are on the device."""
    skills = Path(__file__).parents[2] / "configs" / "skills-fedit.yaml"
    changes = ["federation.rounds=1", "train.max_steps=4", "baselines=[]", "benchmark.clients=2", "report.plots=false"]
    written = {}
    for device in ("cuda", "cpu"):
        done = run(load_experiment(skills, [*changes, f"model.device={device}"]), out=tmp_path / device)
        written[device] = done.results["clients"]
    for client, row in written["cpu"].items():
        assert written["cuda"][client]["exact_match"] == pytest.approx(row["exact_match"], abs=0.03)
