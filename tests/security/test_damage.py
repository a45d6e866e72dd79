"""Damage to the files that a run goes on from: each is named, and the run goes on from what is whole, with the same
bits, or says how to."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.errors import RunError
from befit.core.values import Payload
from befit.flower.server_app import run_over
from befit.flower.service import SiteService
from befit.protocol.engine import Checkpoint
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.artifacts import predict
from befit.runs.directory import RunDirectory
from befit.runs.exporting import export
from befit.runs.host import Host
from befit.runs.outbound import Outbound
from befit.runs.runner import run
from tests.security.test_amounts import NOW, answer, site_of, wants
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import same

STORES = {"memory": "potara", "disk": "ditto"}
DAMAGES = ["a flipped bit", "half of it", "empty", "gone", "a list"]


def config(store: str) -> dict[str, Any]:
    return {
        "name": "damage",
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "method": {"name": STORES[store]},
        "baselines": [],
        "train": {"max_steps": 1, "batch_size": 8},
        "federation": {"rounds": 4},
        "engine": {"store": store},
        "checkpoint": {"every_s": 0},
        "report": {"plots": False},
    }


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    broken = {
        "a flipped bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "half of it": data[:middle],
        "empty": b"",
        "a list": b"[]",
    }
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(broken[how])


def traces(path: Path) -> dict[str, bytes]:
    files = [*path.glob("clients/**/*.safetensors"), path / "metrics.jsonl", path / "outbound.json"]
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(files)}


@pytest.fixture(scope="module")
def host() -> Host:
    return Host(load_experiment(config("memory")))


class Stop(Exception):
    pass


def stopping(path: Path, act: Callable[[Path], None] | None = None) -> Callable[[dict[str, Any]], None]:
    """Stop a run in its third round, or do something to its directory then."""
    clients = 0

    def observe(event: dict[str, Any]) -> None:
        nonlocal clients
        clients += event["kind"] == "client"
        if event["kind"] == "client" and clients == 7:
            if act is None:
                raise Stop
            act(path)

    return observe


@pytest.fixture(scope="module")
def stopped(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, bytes]]]:
    """By store: a run that was stopped in its third round, and what the whole run leaves."""
    found = {}
    for store in STORES:
        folder = tmp_path_factory.mktemp(store)
        with pytest.raises(Stop):
            run(config(store), out=folder / "part", observer=stopping(folder / "part"), host=host)
        run(config(store), out=folder / "whole", host=host)
        found[store] = folder / "part", traces(folder / "whole")
    return found


@pytest.fixture(params=list(STORES))
def part(
    request: pytest.FixtureRequest, stopped: dict[str, tuple[Path, dict[str, bytes]]], tmp_path: Path
) -> tuple[str, Path, dict[str, bytes]]:
    """Store, a copy of a stopped run of its own, and what it has to come to."""
    source, expected = stopped[request.param]
    shutil.copytree(source, tmp_path / "run")
    return request.param, tmp_path / "run", expected


def last(path: Path, kind: str) -> Path:
    """A file of the last checkpoint that the one before does not need."""
    saved = json.loads((path / "checkpoint.json").read_text())
    return {
        "checkpoint": path / "checkpoint.json",
        "server": path / "state" / saved["server"],
        "client": path / "state" / "clients" / next(iter(saved["clients"].values())),
    }[kind]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["checkpoint", "server", "client"])
def test_the_checkpoint_before_takes_the_place_of_a_damaged_one(
    part: tuple[str, Path, dict[str, bytes]], kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, path, _ = part
    broken = last(path, kind)
    damage(broken, how)
    directory, memories = RunDirectory(path), ClientStore(path / "state" / "clients", store == "memory")
    point, _ = directory.restore(memories)
    assert point is not None and point.round == 1
    assert all(memories.load(f"client-{number:02d}") is not None for number in range(3))
    assert broken.name in caplog.text or (kind, how) == ("checkpoint", "gone")
    assert {line["round"] for line in directory.read("metrics")} == {1}
    again, _ = RunDirectory(path).restore(memories)  # and it has taken that place on the disk
    assert again is not None and same(point.server, again.server)


def test_a_run_with_a_damaged_memory_ends_with_the_same_bits(
    part: tuple[str, Path, dict[str, bytes]], host: Host
) -> None:
    """And nothing of the checkpoint before is kept once it is over, nor what a crash left."""
    store, path, expected = part
    damage(last(path, "client"), "a flipped bit")
    for name in (".results.json.x1.tmp", ".report.html.x2.tmp", "clients/.deployment.safetensors.x3.tmp"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("half")
    run(config(store), out=path, resume=True, host=host)
    assert traces(path) == expected
    assert not [*path.rglob("*.tmp"), *path.glob("checkpoint.previous.json")]
    saved = json.loads((path / "checkpoint.json").read_text())
    named = {saved["server"], *saved["clients"].values()}
    assert {file.name for file in (path / "state").rglob("*.safetensors")} == named


@pytest.mark.parametrize("how", DAMAGES)
def test_without_a_whole_checkpoint_the_run_says_how_to_go_on(
    part: tuple[str, Path, dict[str, bytes]], host: Host, how: str
) -> None:
    """What it advises is done once."""
    store, path, expected = part
    (path / "checkpoint.previous.json").unlink()
    broken = last(path, "client")
    damage(broken, how)
    with pytest.raises(RunError) as refused:
        run(config(store), out=path, resume=True, host=host)
    text = str(refused.value)
    assert str(broken) in text and f"remove {path / 'checkpoint.json'}" in text and "\n" not in text
    if how == "gone":
        (path / "checkpoint.json").unlink()
        run(config(store), out=path, resume=True, host=host)
        assert traces(path) == expected


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_damaged_line_is_named_by_its_number(part: tuple[str, Path, dict[str, bytes]], host: Host, name: str) -> None:
    """One that the checkpoint before does not count costs the rounds since then alone."""
    store, path, _ = part
    lines = (path / name).read_bytes().splitlines(keepends=True)
    old = re.sub(rb"[0-9]", b"7", lines[1], count=1)
    assert old != lines[1]
    (path / name).write_bytes(lines[0] + old + b"".join(lines[2:]))
    with pytest.raises(RunError, match=rf"{name} is damaged in line 2: .*copy, or remove .*--resume begins"):
        run(config(store), out=path, resume=True, host=host)
    (path / name).write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b'"round": 2', b'"round": 3'))
    point, _ = RunDirectory(path).restore(ClientStore(path / "state" / "clients", store == "memory"))
    assert point is not None and point.round == 1


def test_a_memory_that_is_damaged_while_a_run_needs_it_ends_the_run(
    stopped: dict[str, tuple[Path, dict[str, bytes]]], host: Host, tmp_path: Path
) -> None:
    """It neither finishes without the client nor trains it from nothing; resuming gives the same bits."""

    def spoil(path: Path) -> None:
        saved = json.loads((path / "checkpoint.json").read_text())
        damage(path / "state" / "clients" / saved["clients"]["client-02"], "a flipped bit")

    with pytest.raises(RunError, match=r"client-02\.\d+\.safetensors is damaged"):
        run(config("disk"), out=tmp_path / "run", observer=stopping(tmp_path / "run", spoil), host=host)
    run(config("disk"), out=tmp_path / "run", resume=True, host=host)
    assert traces(tmp_path / "run") == stopped["disk"][1]


def test_files_of_a_finished_run(host: Host, stopped: dict[str, Any], tmp_path: Path) -> None:
    """What can be made again is; of the rest the message says what to do, and that works."""
    source, expected = stopped["disk"]
    path = tmp_path / "run"
    shutil.copytree(source.with_name("whole"), path)

    def resumed() -> dict[str, Any]:
        return dict(run(config("disk"), out=path, resume=True, host=host).results["clients"])

    before = resumed()
    for name in ("results.json", "method.json"):
        for how in DAMAGES:
            damage(path / name, how)
            if name == "method.json":
                (path / "report.html").unlink()
            assert resumed().keys() == before.keys() and traces(path) == expected
    manifest = (path / "run.json").read_bytes()
    for how in DAMAGES[:2]:
        damage(path / "run.json", how)
        for act in (resumed, lambda: predict(path, "client-00", ["x.png"])):
            with pytest.raises(RunError, match=r"run\.json is damaged: .* remove it and resume the run"):
                act()
        (path / "run.json").write_bytes(manifest)
    (path / "run.json").unlink()
    resumed()
    assert (path / "run.json").read_bytes() == manifest
    settings = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(settings.replace("max_steps: 1", "max_steps: 3"))
    for given in (config("disk"), path / "config.yaml"):
        with pytest.raises(RunError, match=r"config\.yaml is damaged, or was changed"):
            run(given, out=path, resume=True, host=host)
    damage(path / "clients" / "client-00" / "deployment.safetensors", "a flipped bit")
    (path / "config.yaml").write_text(settings)
    with pytest.raises(RunError, match=r"client-00/deployment\.safetensors is damaged.* Remove .*client-00 and run"):
        predict(path, "client-00", [{"image": "x.png"}])
    shutil.rmtree(path / "clients" / "client-00")
    resumed()
    assert traces(path) == expected
    adapter = path / "clients" / "client-00" / "adapter" / "adapter_model.safetensors"
    damage(adapter, "a flipped bit")
    with pytest.raises(RunError, match=r"adapter_model\.safetensors is damaged"):
        export(path, "client-00", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_logs_are_on_the_disk_before_the_checkpoint_that_counts_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    rename = os.replace

    def renamed(before: str, after: Path) -> None:
        done.append(after.name)
        rename(before, after)

    directory = RunDirectory(tmp_path)
    directory.log("metrics", {"loss": 0.5})
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "replace", renamed)
    directory.commit(Checkpoint(0, 1, Payload()), directory.store(True), Outbound())
    directory.close()
    assert done.index((tmp_path / "metrics.jsonl").stat().st_ino) < done.index("checkpoint.json")


def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    import torch

    from befit.core.storage import log_line, read_lines, read_sealed, write_sealed

    write_payload(tmp_path / "state", Payload({"a": torch.arange(3.0), "b": torch.ones(2, 0)}, {"round": 3}))
    write_sealed(tmp_path / "json", {"stage": 0, "round": 3, "clients": {"Zoë": "a.1.safetensors"}})
    (tmp_path / "log").write_bytes(log_line({"loss": 0.25}) + log_line({"loss": float("nan")}))
    for name, read in (("state", read_payload), ("json", read_sealed), ("log", read_lines)):
        path = tmp_path / name
        data = path.read_bytes()
        read(path)
        for place in range(len(data)):
            broken = bytearray(data)
            broken[place] ^= 1 << place % 8
            path.write_bytes(broken)
            with pytest.raises(RunError, match=f"{path} is damaged"):
                read(path)
        for cut_or_longer in (data[:-1], data + b" "):
            path.write_bytes(cut_or_longer)
            with pytest.raises(RunError, match=f"{path} is damaged"):
                read(path)


def test_a_site_whose_reply_is_damaged_makes_it_again_and_names_a_damaged_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from befit.flower.site_state import SiteMemory, Stamp

    memory = SiteMemory(tmp_path)
    for number in (1, 2):
        memory.save("a", Payload({"x": torch.full((2,), float(number))}))
        memory.keep(Stamp(0, number, number, f"request {number}"), b"reply %d" % number)
    asked = Stamp(0, 2, 2, "request 2")
    assert SiteMemory(tmp_path).answered(asked) == b"reply 2"
    (reply,) = tmp_path.glob("reply.*")
    for how in DAMAGES:
        whole = reply.read_bytes()
        damage(reply, how)
        again = SiteMemory(tmp_path)
        assert again.answered(asked) is None and reply.name in caplog.text
        before = again.load("a")
        assert before is not None and before.arrays["x"].tolist() == [1.0, 1.0]
        reply.write_bytes(whole)
    newest = tmp_path / json.loads((tmp_path / "stamp.json").read_text())["files"]["after"]
    damage(newest, "a flipped bit")
    with pytest.raises(
        RunError, match=rf"{newest.name} is damaged: .* or remove .*stamp\.json, and this client goes on"
    ):
        SiteMemory(tmp_path).load("a")
    for how in DAMAGES[:3]:
        stamp = (tmp_path / "stamp.json").read_bytes()
        damage(tmp_path / "stamp.json", how)
        with pytest.raises(RunError, match=r"stamp\.json is damaged: .* or remove .*stamp\.json, and this client"):
            SiteMemory(tmp_path)
        (tmp_path / "stamp.json").write_bytes(stamp)
    (tmp_path / "stamp.json").unlink()
    assert SiteMemory(tmp_path).load("a") is None


@pytest.mark.parametrize("name", ["agreed.json", "fedit/asked.json", "fedit/.outbound.json"])
def test_a_site_whose_record_of_a_run_is_damaged_does_not_go_on_from_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operator's log says which file it is, and the server learns that something is damaged there."""
    service = SiteService(site_of(tmp_path))
    assert answer(service, "hello", wants())[0]["kind"] == "hello"
    said, sent = answer(service, "train", wants())
    assert said["kind"] == "update"
    path = tmp_path / "state" / "runs" / "r" / name
    path.write_bytes(path.read_bytes().replace(b"fed", b"Fed", 1))  # which leaves it JSON
    said, arrays = answer(service, "train", wants(), arrays=sent, at={**NOW, "round": 2})
    assert said["error"] == "Damaged" and not arrays and str(tmp_path) not in said["reason"]
    assert f"{path} is damaged: its content does not match its checksum" in caplog.text


def test_a_server_whose_record_of_its_sites_is_damaged_says_so_before_anybody_is_asked(tmp_path: Path) -> None:
    grid = LoopbackGrid([])
    (tmp_path / "config.yaml").touch()
    (tmp_path / ".sites.json").write_text('{"run": "r", "nodes": {"north": 11}}')
    with pytest.raises(RunError, match=r"\.sites\.json is damaged"):
        run_over(grid, wants(), tmp_path, resume=True)
    assert not grid.sent
