"""Which settings a resumed run may change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment, to_dict, to_yaml
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, Damaged, RunError
from befit.core.storage import atomic_write, read_sealed, write_sealed
from befit.runs.directory import RunDirectory
from befit.runs.host import Host
from befit.runs.loading import weights_hashes
from befit.runs.provenance import (
    LATER,
    check_directory,
    default_directory,
    experiment_of,
    identify,
    result_affecting,
    settings_hash,
)
from befit.runs.runner import run
from tests.unit.models.tiny_models import save_bert

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
    key, _, value = change.partition("=")
    with pytest.raises(RunError, match=rf"another configuration: {re.escape(key)} was \S+ and is \"?{value}"):
        check_directory(tmp_path, after, resume=True)


def test_nothing_of_the_engine_but_waiting_is_left_out() -> None:
    kept = result_affecting(to_dict(load_experiment(SETTINGS)))["engine"]
    assert set(kept) == {"kind", "workers", "fleet", "store", "threads", "serialise"}
    assert kept["serialise"] is False  # a key that is gone, at what it was in every run: kept cells stay those of today


@pytest.mark.parametrize("plugin", ["inside.py", "../beside.py", "sub/../../beside.py"])
def test_a_run_that_somebody_passed_on_brings_no_code(plugin: str, tmp_path: Path) -> None:
    """Nor where its configuration is a link, from which a path would count."""
    run_dir = tmp_path / "run"
    (run_dir / "sub").mkdir(parents=True)
    for place in (run_dir / "inside.py", tmp_path / "beside.py"):
        place.write_text("raise SystemExit")
    written = to_yaml(load_experiment(SETTINGS)).replace("plugins: []", f"plugins: [{plugin}]")
    atomic_write(run_dir / "sub" / "config.yaml", written.encode())
    (run_dir / "config.yaml").symlink_to(run_dir / "sub" / "config.yaml")
    with pytest.raises(ConfigError, match="may have come with the run directory, and is not loaded from there"):
        experiment_of(run_dir)


def test_a_log_that_is_a_link_is_not_cut(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(victim)
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(Damaged, match=r"metrics\.jsonl is a link"):
        directory.restore(directory.store(True))
    assert victim.read_text() == "mine"


def test_a_run_goes_on_on_the_kind_of_device_that_it_began_on(tmp_path: Path) -> None:
    """Kernels of a GPU sum in another order. What `auto` comes to is only known on the machine."""
    host = Host(load_experiment(SETTINGS))
    identify(tmp_path, host)
    identify(tmp_path, host)
    began = read_sealed(tmp_path / "run.json")
    assert began["device"] == host.model.device.type
    write_sealed(tmp_path / "run.json", {**began, "device": "another"})
    with pytest.raises(RunError, match="device changed since"):
        identify(tmp_path, host)


def _yaml(experiment: Experiment) -> bytes:
    return to_yaml(experiment).encode()


def test_keys_that_came_later_do_not_make_earlier_runs_other_ones():
    """At their defaults they are not there, so that studies go on over an update; at anything else they count."""
    plain = load_experiment({"benchmark": "digits", "method": "fedit"})
    told = result_affecting(to_dict(plain))
    for block, keys in LATER.items():
        for key, usual in keys.items() if block in told else ():
            assert key not in told[block]
            assert to_dict(plain)[block].get(key) == usual
    for change in ("train.epochs=2", "train.micro_batch=1", "train.loraplus_ratio=2", "adapter.start=x"):
        assert settings_hash(load_experiment(plain, [change])) != settings_hash(plain)
    questions = load_experiment({"benchmark": "digits-vqa", "method": "fedit"})
    assert settings_hash(load_experiment(questions, ["benchmark.streams=10"])) != settings_hash(questions)


def test_results_of_an_earlier_run_are_not_in_the_way(tmp_path: Path) -> None:
    assert default_directory("a", False, tmp_path) == tmp_path / "a"
    for name in ("a", "a-2"):
        atomic_write(tmp_path / name / "results.json", b"{}")
    assert default_directory("a", False, tmp_path) == tmp_path / "a-3"
    assert default_directory("a", True, tmp_path) == tmp_path / "a-2"
    (tmp_path / "a-3").mkdir()
    assert default_directory("a", True, tmp_path) == tmp_path / "a-3"
    atomic_write(tmp_path / "a-3" / "compare.json", b"{}")
    assert default_directory("a", False, tmp_path) == tmp_path / "a-4"


def test_a_run_without_a_directory_goes_on_in_the_last_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**SETTINGS, "benchmark": {"name": "digits", "clients": 2}, "train": {"max_steps": 1}}
    settings["name"], settings["baselines"] = "a", []
    first = run(settings, quiet=True)
    again = run(settings, resume=True, quiet=True)
    assert again.path == first.path == Path("runs", "a") and again.results == first.results


def test_a_finished_run_is_not_shown_as_that_of_records_that_have_changed_since(tmp_path: Path) -> None:
    """Whoever resumes it may think that it was trained on them. Without the files its results stand."""
    model, files = save_bert(tmp_path / "model"), [tmp_path / f"{client}.csv" for client in "ab"]
    rows = [f"{word},{word}" for word in ("neg", "pos")] * 8
    for file in files:
        file.write_text("\n".join(["text,label", *rows]))
    config = {
        "model": {"id": str(model), "max_length": 8},
        "data": {"task": "text-classification", "clients": {file.stem: str(file) for file in files}},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 1, "batch_size": 2},
        "federation": {"rounds": 1},
        "report": {"plots": False},
        "baselines": [],
    }
    done = run(config, out=tmp_path / "run").results
    assert run(config, out=tmp_path / "run", resume=True).results == done
    files[0].write_text("\n".join(["text,label", *rows[2:], "neg,pos", "pos,neg"]))
    with pytest.raises(RunError, match="was started with other data, weights, plugins or device: data changed since"):
        run(config, out=tmp_path / "run", resume=True)
    for file in files:
        file.unlink()
    assert run(config, out=tmp_path / "run", resume=True).results == done


def test_a_run_goes_on_with_data_that_were_moved(tmp_path: Path) -> None:
    """As the same records, whichever of the two ways names the new place; other records are refused."""
    model = save_bert(tmp_path / "model")

    def written(folder: str, word: str = "neg") -> dict[str, str]:
        (tmp_path / folder).mkdir()
        for client in "ab":
            rows = ["text,label", *[f"{each},{each}" for each in (word, "pos")] * 8]
            (tmp_path / folder / f"{client}.csv").write_text("\n".join(rows))
        return {client: str(tmp_path / folder / f"{client}.csv") for client in "ab"}

    def config(clients: dict[str, str]) -> dict[str, Any]:
        return {
            "model": {"id": str(model), "max_length": 8},
            "data": {"task": "text-classification", "clients": clients},
            "method": {"name": "ditto", "rank": 2},
            "train": {"max_steps": 1, "batch_size": 2},
            "federation": {"rounds": 3},
            "report": {"plots": False},
            "baselines": [],
        }

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    first, moved, other = written("first"), written("moved"), written("other", "good")
    whole = run(config(first), out=tmp_path / "whole").results
    for number, out in enumerate((tmp_path / "named", tmp_path / "corrected")):
        with pytest.raises(KeyboardInterrupt):
            run(config(first), out=out, observer=stop)
        with pytest.raises(RunError, match=r"was started with other data, .*: label_names, data changed"):
            run(config(other), out=out, resume=True)
        if number == 0:
            done = run(config(moved), out=out, resume=True)
        else:  # by hand, in the run's own configuration
            text = (out / "config.yaml").read_text()
            (out / "config.yaml").write_text(text.replace(str(tmp_path / "first"), str(tmp_path / "moved")))
            done = run(out / "config.yaml", out=out, resume=True)
        scores = {client: row["loss"] for client, row in done.results["clients"].items()}
        assert scores == {client: row["loss"] for client, row in whole["clients"].items()}
        kept = experiment_of(out).data
        assert kept is not None and kept.clients == moved
        another = config(moved)
        another["data"]["newcomers"] = {"c": other["a"]}
        with pytest.raises(RunError, match=r"was started with another configuration: data\..* was .* and is "):
            run(another, out=out, resume=True)  # whose results would be those without it


def test_a_model_in_two_revisions_has_the_weights_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "models--owner--tiny"
    for revision, commit in (("v1", "1" * 40), ("v2", "2" * 40), ("v3", "3" * 40)):
        (hub / "snapshots" / commit).mkdir(parents=True)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def hashes(small: str, large: str) -> dict[str, str]:
        models = {"id": "owner/tiny", "revision": large}
        families = {"small": {"clients": ["client-00"], "model": {"id": "owner/tiny", "revision": small}}}
        return weights_hashes(load_experiment({**SETTINGS, "model": models, "families": families}))

    assert hashes("v1", "v1") == {"owner/tiny": "1" * 40}
    assert hashes("v1", "v2") == {"owner/tiny": f"{'1' * 40} {'2' * 40}"} != hashes("v3", "v2")
