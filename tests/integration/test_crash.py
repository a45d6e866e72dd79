"""A run that is killed, at any moment and in the middle of a write, and resumed ends with the same bits."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from befit.runs.runner import run
from tests.backbones import short_vit
from tests.processes import befit, call

CONFIG = """
name: crash
model: {id: MODEL}
benchmark: {name: digits, clients: 3, alpha: 10.0}
limit: {records: 24}
method: {name: METHOD}
baselines: [local]
train: {max_steps: 2}
federation: {rounds: 4}
evaluate: {every: 2}
engine: {store: STORE}
checkpoint: {every_s: 0}
report: {plots: false}
"""
PRIVATE = "privacy: {unit: example, delta: 1.0e-3, noise_multiplier: 1.0, accountant: rdp, reproducible: true}"


# Counts calls of the function that is named and kills the process, without any clean-up, at the call that is asked
# for: before a rename, after it, or with half of the bytes of a file on the disk.
def killer(where: str, count: int, config: str, out: str) -> None:
    calls = 0

    def dying(real: Callable[..., Any], when: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if when == "half" and os.path.isdir(f"/proc/self/fd/{args[0]}"):
                return real(*args, **options)  # a folder's names, of which there is no half
            calls += 1
            if calls == count:
                if when == "half":
                    handle = args[0]
                    size = os.fstat(handle).st_size
                    whole = os.readlink(f"/proc/self/fd/{handle}").endswith(".tmp")  # a log is only torn at its end
                    os.ftruncate(handle, size // 2 if whole else size - 3)
                if when == "after":
                    real(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    if where == "before rename":
        os.replace = dying(os.replace, "before")
    if where == "after rename":
        os.replace = dying(os.replace, "after")
    if where == "half written":
        os.fsync = dying(os.fsync, "half")
    run(config, out=out, resume=True)


def start(where: str, count: int, config: Path, out: Path) -> CompletedProcess[str]:
    return call(killer, where, count, str(config), str(out))


def traces(path: Path) -> dict[str, Any]:
    """Everything that has to repeat exactly: adapters byte by byte, metrics, what left, epsilon, and the results."""
    files = sorted(p for p in path.rglob("*") if p.suffix == ".safetensors" and "state" not in p.parts)
    found: dict[str, Any] = {str(p.relative_to(path)): p.read_bytes() for p in files}
    for name in ("metrics.jsonl", "outbound.json", "baselines/local/metrics.jsonl"):
        found[name] = (path / name).read_bytes()
    results = json.loads((path / "results.json").read_text())
    found["scores"] = {client: row["accuracy"] for client, row in results["clients"].items()}
    found["spent"] = results.get("privacy", {}).get("spent")
    found["bytes"] = {client: (row["bytes_up"], row["bytes_down"]) for client, row in results["clients"].items()}
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, dict[str, Any]]]:
    runs = {}
    for method, store, more in (("potara", "memory", ""), ("ditto", "disk", PRIVATE)):
        folder = tmp_path_factory.mktemp(f"{method}-{store}")
        config = folder / "config.yaml"
        text = CONFIG.replace("MODEL", short_vit()).replace("METHOD", method).replace("STORE", store)
        config.write_text(text + more)
        done = start("never", 0, config, folder / "run")
        assert done.returncode == 0, done.stderr
        runs[method, store] = (config, traces(folder / "run"))
    assert all(0 < each < 100 for each in runs["ditto", "disk"][1]["spent"].values())
    return runs


@pytest.mark.parametrize("method, store", [("potara", "memory"), ("ditto", "disk")])
@pytest.mark.parametrize("where, count", [("after rename", 5), ("half written", 26), ("before rename", 33)])
def test_killed_and_resumed_equals_uninterrupted(
    method: str, store: str, where: str, count: int, whole: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    config, expected = whole[method, store]
    killed = start(where, count, config, tmp_path / "run")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = start("never", 0, config, tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    found = traces(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    leftovers = [p for p in (tmp_path / "run" / "state").rglob("*") if p.name.endswith(".tmp")]
    assert leftovers == []


def test_killed_again_and_again_equals_uninterrupted(whole: dict[tuple[str, str], Any], tmp_path: Path) -> None:
    """Every attempt dies some writes after it started, in the middle of one; in the end nothing differs."""
    config, expected = whole["potara", "memory"]
    for _ in range(12):
        attempt = start("half written", 30, config, tmp_path / "run")
        if attempt.returncode == 0:
            break
        assert attempt.returncode == -signal.SIGKILL, attempt.stderr
    else:
        pytest.fail("twelve attempts of thirty writes each made no end of it")
    assert traces(tmp_path / "run") == expected


def filled(limit: int, *words: str) -> None:
    """The command `befit` where no file can be longer than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit then fails as one on a full disk does
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    befit(*words)


@pytest.mark.parametrize("limit", [100, 8_000, 60_000])
def test_a_full_disk_is_one_clear_message_and_the_run_can_be_resumed(
    limit: int, whole: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    """100 bytes stop the configuration, 8,000 a log, 60,000 a checkpoint."""
    config, expected = whole["potara", "memory"]
    full = call(filled, limit, "run", str(config), "--out", str(tmp_path / "run"))
    assert full.returncode in (1, 2), full.stderr
    assert "cannot write" in full.stderr and "File too large" in full.stderr
    assert "Traceback" not in full.stderr
    resumed = start("never", 0, config, tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert traces(tmp_path / "run") == expected
