"""Runs that begin with the same stages do them once, and end with the bytes that each would have alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.errors import NotTrained
from befit.protocol.method import run_stages
from befit.protocol.registry import build_method
from befit.protocol.stage import Exchange
from befit.runs.runner import run
from befit.runs.shared_stages import SharedFolder, shared_stages_keys
from befit.studies.compare.comparison import Compared, compare, make_plan
from tests.backbones import short_vit
from tests.processes import fork_workers
from tests.tiny import federated
from tests.unit.flower.states import same, server_memory

BASES = {"FedIT": {"name": "fedit", "rank": 2}, "Ditto": {"name": "ditto", "rank": 2}}
OURS = {
    "LoRA": {"name": "lora", "rank": 1, "epochs": 1},
    "FedP2EFT": {"name": "fedp2eft", "rank": 1, "epochs": 1, "budgets": [2]},
}
RUNS = {f"{ours} on {base}": {"method": {**OURS[ours], "base": BASES[base]}} for base in BASES for ours in OURS}


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"id": short_vit()},
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "limit": {"records": 10},
        "train": {"max_steps": 1},
        "federation": {"rounds": 2, "cohort": 2},
        "report": {"plots": False},
        **changes,
    }


def study(runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"study": {"title": "Shared bases"}, "base": settings(**changes), "runs": runs}


SAME = ("metrics.jsonl", "outbound.json", "adapter_model.safetensors")


def traces(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.name in SAME}


def trained(events: list[dict[str, Any]], stage: str) -> dict[int, int]:
    """How often a client has trained in a stage, by cell."""
    found: dict[int, int] = {}
    for event in events:
        if event["kind"] == "client" and event["stage"] == stage:
            found[event["cell"]] = found.get(event["cell"], 0) + 1
    return found


@pytest.mark.parametrize(("jobs", "store"), [(2, "disk"), pytest.param(1, "memory", marks=pytest.mark.slow)])
def test_cells_on_one_base_are_what_each_is_alone(
    jobs: int, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cohort of two of three clients leaves clients whose memory the base never touched."""
    fork_workers(monkeypatch)
    events: list[dict[str, Any]] = []
    wanted = study(RUNS, engine={"store": store})
    done = compare(wanted, out=tmp_path / "all", jobs=jobs, observer=events.append)
    assert not done.failures
    by_base = trained(events, "federate")
    assert sorted(by_base.values()) == [4, 4], "each base is trained once: two rounds of two clients"
    assert {number // 2 for number in by_base} == {0, 1}
    assert not (done.path / "shared_stages").exists()
    for cell in make_plan(wanted).cells:
        (together,) = (done.path / "runs").glob(f"*-{cell.key}")
        alone = run(cell.experiment, out=tmp_path / cell.key)  # cells have no baselines
        assert traces(together) == traces(alone.path), cell.label
        assert len(traces(together)) >= 2 + 3


def test_merges_of_two_branches_train_them_once_and_are_what_each_is_alone(tmp_path: Path) -> None:
    """Also where the merged adapter has another rank, which the branches know nothing of."""
    blocks: list[dict[str, Any]] = [
        {"name": "potara", "rank": 2, "statistics": {"samples": 4}},
        {"name": "potara", "rank": 2, "statistics": {"samples": 4}, "merge_space": "product"},
        {"name": "fisher_merging", "rank": 2, "statistics": {"samples": 4}},
        {"name": "interpolation", "rank": 2},
        {"name": "interpolation", "rank": 2, "w": "cross-fitted"},
    ]
    events: list[dict[str, Any]] = []
    runs = {f"merge {number}": {"method": block} for number, block in enumerate(blocks)}
    wanted = study(runs)
    done = compare(wanted, out=tmp_path / "all", observer=events.append)
    assert not done.failures
    assert trained(events, "federate") == {0: 4} and trained(events, "local") == {0: 6}
    for cell in make_plan(wanted).cells:
        (together,) = (done.path / "runs").glob(f"*-{cell.key}")
        assert traces(together) == traces(run(cell.experiment, out=tmp_path / cell.key).path), cell.label
    assert key([], blocks[0]) == key([], blocks[3]) != key([], {**blocks[3], "weights": "uniform"})


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_trains_each_branch_once_with_the_methods_that_are_one_of_them(every: int, tmp_path: Path) -> None:
    """Also where all of them are scored after every round: the merge of each is then scored without training again."""
    events: list[dict[str, Any]] = []
    methods = {
        "potara": {"name": "potara", "rank": 2, "statistics": {"samples": 4}},
        "local": {"name": "local", "rank": 2},
        "fedit": {"name": "fedit", "rank": 2},
        "fedavgm": {"name": "fedavgm", "rank": 2},
    }
    common = settings(federation={"rounds": 3, "cohort": 2}, evaluate={"every": every})
    first, *others = methods.values()
    both = run({**common, "method": first, "baselines": others}, out=tmp_path / "all", observer=events.append)
    calls = [(one["run"], one["stage"]) for one in events if one["kind"] == "client"]
    assert calls.count(("local", "local")) == 9 and calls.count(("fedit", "federate")) == 6
    assert not {("potara", "local"), ("potara", "federate")} & set(calls)
    assert calls.count(("fedavgm", "federate")) == 6, "another server step is another stage"
    assert not (both.path / "shared_stages").exists()
    for label, block in methods.items():
        there = both.path if label == "potara" else both.path / "baselines" / label
        alone = run({**common, "method": block, "baselines": []}, out=tmp_path / label)
        mine = {name: data for name, data in traces(there).items() if not name.startswith("baselines")}
        assert mine == traces(alone.path), label


def test_a_branch_that_was_interrupted_and_resumed_is_shared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds that were scored before the interruption are left too, though another process leaves the rest."""
    config = settings(
        method={"name": "interpolation", "rank": 2},
        baselines=[{"name": "fedit", "rank": 2}],
        federation={"rounds": 4, "cohort": 2},
        evaluate={"every": 1},
        checkpoint={"every_s": 0},
    )
    events: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "client" and (event["run"], event["round"]) == ("fedit", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=stop)
    monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
    run(config, out=tmp_path / "run", resume=True, observer=events.append)
    calls = [(one["run"], one["stage"]) for one in events if one["kind"] == "client"]
    assert calls.count(("fedit", "federate")) == 4 and ("interpolation", "federate") not in calls


def test_a_cross_fitted_run_takes_the_branches_of_everything_and_trains_its_folds(tmp_path: Path) -> None:
    """Those are its own: no other run leaves out the same examples. A crash in one of them changes nothing."""
    cross_fitted = {"name": "interpolation", "rank": 2, "w": "cross-fitted"}
    config = settings(method=cross_fitted, baselines=[{"name": "local", "rank": 2}, {"name": "fedit", "rank": 2}])
    config["limit"]["records"] = 24
    events: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        events.append(event)
        if event["kind"] == "client" and event["stage"] == "federate-2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=stop)
    done = run(config, out=tmp_path / "run", resume=True, observer=events.append)
    trained_there = {one["stage"] for one in events if one["kind"] == "client" and one["run"] == "interpolation"}
    assert trained_there == {*(f"{name}-{n}" for n in (1, 2, 3) for name in ("local", "federate", "weigh")), "merge"}
    alone = run({**config, "baselines": []}, out=tmp_path / "alone")
    mine = {name: data for name, data in traces(done.path).items() if not name.startswith("baselines")}
    assert mine == traces(alone.path)
    # What newcomers are weighed by: of the folds too, which the run that left the federation does not know.
    assert same(server_memory(done.path), server_memory(alone.path))
    assert {*server_memory(alone.path).parts()} >= {f"server:fold-{number}" for number in (1, 2, 3)}


@pytest.mark.parametrize(
    "order", [("potara", "fedit", "local"), pytest.param(("fedit", "local", "potara"), marks=pytest.mark.slow)]
)
def test_cells_take_a_branch_from_whichever_trained_it_first(order: tuple[str, ...], tmp_path: Path) -> None:
    """A cell that chooses among several methods too, for each of them; what no other has it trains itself."""
    events: list[dict[str, Any]] = []
    runs: dict[str, Any] = {name: {"method": {"name": name, "rank": 2}} for name in order}
    members = [{"name": name, "rank": 2} for name in ("fedavgm", "local", "fedit")]
    choice = {"federation.deploy": "best", "baselines": members[1:]}
    runs["choice"] = {"method": members[0], "set": choice}
    wanted = study(runs)
    done = compare(wanted, out=tmp_path / "all", observer=events.append)
    assert not done.failures
    assert sum(trained(events, "federate").values()) == 4 + 4 and sum(trained(events, "local").values()) == 6
    for cell in make_plan(wanted).cells:
        (together,) = (done.path / "runs").glob(f"*-{cell.key}")
        assert traces(together) == traces(run(cell.experiment, out=tmp_path / cell.key).path), cell.label


def test_a_run_that_keeps_rounds_of_a_stage_trains_it_itself(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path / "shared")
    run(settings(method={"name": "fedit", "rank": 2}), out=tmp_path / "first", shared_stages=folder)
    keeps = settings(method={"name": "fedit", "rank": 2}, checkpoint={"keep": [1]})
    done = run(keeps, out=tmp_path / "second", shared_stages=folder)
    assert [str(path.relative_to(done.path)) for path in done.path.rglob("kept/*/*")] == [
        "kept/federate/00001.safetensors"
    ]


def test_rounds_of_one_number_are_kept_of_every_federated_stage(tmp_path: Path) -> None:
    keeps = settings(method={"name": "fed_sb", "rank": 2}, checkpoint={"keep": [1]})
    done = run(keeps, out=tmp_path / "run")
    federated = [stage.name for stage in run_stages(build_method(keeps["method"])) if stage.federated]
    assert len(federated) == 2
    assert sorted(path.name for path in (done.path / "kept").iterdir()) == sorted(federated)


def test_methods_of_one_run_share_their_base(tmp_path: Path) -> None:
    """Which has three rounds, where everything else has two."""
    based = [{**block, "base": {**BASES["FedIT"], "rounds": 3}} for block in OURS.values()]
    events: list[dict[str, Any]] = []
    both = run(settings(method=based[0], baselines=based[1:]), out=tmp_path / "both", observer=events.append)
    assert len([one for one in events if one["kind"] == "client" and one["stage"] == "federate"]) == 6
    assert not (both.path / "shared_stages").exists()
    alone = run(settings(method=based[0], baselines=[]), out=tmp_path / "alone")
    mine = {name: data for name, data in traces(both.path).items() if not name.startswith("baselines")}
    assert mine == traces(alone.path)


def test_a_method_that_is_scored_during_its_base_trains_that_itself(tmp_path: Path) -> None:
    """Those scores are of the whole method; one that has something to federate after its base is not scored there."""
    based = [{**block, "base": BASES["FedIT"]} for block in OURS.values()]
    scored = settings(evaluate={"every": 1})
    both = run({**scored, "method": based[0], "baselines": based[1:]}, out=tmp_path / "both")
    for label, block in {"lora": based[0], "fedp2eft": based[1]}.items():
        there = both.path if label == "lora" else both.path / "baselines" / label
        alone = run({**scored, "method": block, "baselines": []}, out=tmp_path / label)
        mine = {name: data for name, data in traces(there).items() if not name.startswith("baselines")}
        assert mine == traces(alone.path), label


def test_a_base_with_a_failure_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one run could not do, maybe for want of memory, the next one tries for itself."""
    exchange = type(federated(build_method("fedit")))
    real, calls = exchange.client_update, []

    def once(self: Exchange, client: Any, received: Any, site: Any, at: Any) -> Any:
        calls.append(at)
        if len(calls) == 1:
            raise NotTrained("the first call of all")
        return real(self, client, received, site, at)

    monkeypatch.setattr(exchange, "client_update", once)
    on_fedit = {label: block for label, block in RUNS.items() if label.endswith("FedIT")}
    events: list[dict[str, Any]] = []
    done: Compared = compare(study(on_fedit), out=tmp_path, observer=events.append)
    assert not done.failures
    assert len([one for one in events if one["kind"] == "failure"]) == 1
    assert trained(events, "federate") == {0: 4, 1: 4}


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "server.safetensors", 50),
    "a client gone": lambda folder: next((folder / "clients").iterdir()).unlink(),
    "half a log": lambda folder: os.truncate(folder / "metrics.jsonl", 100),
    "other data": lambda folder: (folder / "shared_stages.json").write_text(
        (folder / "shared_stages.json").read_text().replace('"data": "', '"data": "0')
    ),
    "a list of another shape": lambda folder: (folder / "shared_stages.json").write_text(
        '{"files": ["metrics.jsonl"]}'
    ),
    "no object": lambda folder: (folder / "shared_stages.json").write_text("[]"),
    "no list": lambda folder: (folder / "shared_stages.json").unlink(),
}


QUICK = ("cut", "other data", "no list")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Shared stages as a run leaves them, and what a second run comes to from them."""
    path = tmp_path_factory.mktemp("left")
    folder = SharedFolder(path / "shared_stages")
    run(lora_on_fedit(), out=path / "first", shared_stages=folder)
    return folder.path, traces(run(lora_on_fedit(), out=path / "second", shared_stages=folder).path)


def lora_on_fedit() -> dict[str, Any]:
    return settings(method={**OURS["LoRA"], "base": BASES["FedIT"]}, baselines=[])


@pytest.mark.parametrize(
    "damage", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES]
)
def test_damaged_or_foreign_shared_stages_are_made_again(
    damage: str, left: tuple[Path, dict[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(left[0], tmp_path / "shared_stages")
    (folder,) = (tmp_path / "shared_stages").iterdir()
    DAMAGES[damage](folder)
    shared = SharedFolder(tmp_path / "shared_stages")
    assert traces(run(lora_on_fedit(), out=tmp_path / "run", shared_stages=shared).path) == left[1]
    assert f"{folder} is not used" in caplog.text
    assert traces(folder).keys() == traces(next(left[0].iterdir())).keys(), "whole again, for the next"
    caplog.clear()
    assert traces(run(lora_on_fedit(), out=tmp_path / "again", shared_stages=shared).path) == left[1]
    assert str(folder) not in caplog.text


def test_a_folder_that_cannot_be_written_costs_no_run(
    left: tuple[Path, dict[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shared_stages").write_text("a file")
    shared = SharedFolder(tmp_path / "shared_stages")
    assert traces(run(lora_on_fedit(), out=tmp_path / "run", shared_stages=shared).path) == left[1]
    assert str(tmp_path / "shared_stages") in caplog.text


def test_a_comparison_removes_its_own_shared_stages_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "shared_stages").mkdir()
    (tmp_path / "shared_stages" / "mine.txt").write_text("mine")
    assert not compare(study(dict(list(RUNS.items())[:2])), out=tmp_path).failures
    assert [one.name for one in (tmp_path / "shared_stages").iterdir()] == ["mine.txt"]


def key(changes: list[str], block: dict[str, Any]) -> dict[int, str]:
    return shared_stages_keys(load_experiment(settings(method=block), changes), block)


def test_what_decides_the_base_decides_the_key() -> None:
    lora, fedp2eft = ({**block, "base": BASES["FedIT"]} for block in OURS.values())
    assert key([], lora) == key([], fedp2eft) != {}
    assert key([], {**lora, "rank": 7, "base": {"name": "fedit", "rank": 2, "alpha": 16.0}}) == key([], lora)
    assert key([], {**lora, "base": {"name": "fedit", "rank": 3}}) != key([], lora)
    assert key([], {**lora, "base": {"name": "fedit", "rank": 2, "rounds": 5}}) != key([], lora)
    for change in ("federation.seed=1", "train.lr=0.5", "federation.rounds=3", "benchmark.clients=4"):
        assert key([change], lora) != key([], lora), change
    apart = {**lora, "base": {"name": "fedit", "rank": 2, "train": {"lr": 0.1}}}
    assert key(["train.lr=0.5"], apart) == key(["train.lr=0.2"], apart) == key(["train.lr=0.1"], lora) != key([], lora)
    assert key(["train.batch_size=3"], apart) != key([], apart)
    dropping = {**lora, "base": {"name": "fedit", "rank": 2, "dropout": 0.1}}
    assert key([], dropping) == key(["adapter.dropout=0.1"], lora) != key([], lora)
    assert key([], OURS["LoRA"]) == {}, "no base"
