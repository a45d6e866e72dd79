"""What a file that was written survives."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from befit.core.errors import RunError
from befit.core.storage import atomic_write, remove_litter, write_shared


def test_a_file_is_durable_before_it_has_its_name_and_its_name_before_the_write_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut needs: bytes, then the name, then the folders that hold it."""
    done: list[str] = []
    flush, rename = os.fsync, os.replace

    def flushed(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "bytes")
        flush(handle)

    def renamed(before: str, after: Path) -> None:
        done.append("name")
        rename(before, after)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    atomic_write(tmp_path / "new" / "newer" / "file", b"bytes")
    assert done == ["folder", "folder", "bytes", "name", "folder"]


def test_a_file_system_that_cannot_flush_folders_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError("not supported")

    monkeypatch.setattr(os, "fsync", flush)
    atomic_write(tmp_path / "file", b"bytes")
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(handle: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(RunError, match=r"cannot write .*file: No space left on device; nothing half-written was kept"):
        atomic_write(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_only_what_a_killed_write_left_is_removed_and_not_where_another_process_may_write(tmp_path: Path) -> None:
    kept = [".lock", ".sites.json", "draft.tmp", "inside/.lock", "inside/.state.x.tmp", "inside/deeper/.state.x.tmp"]
    for name in (*kept, ".results.json.x.tmp", "clients/north/.adapter.x.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_litter(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_a_shared_file_that_is_there_already_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for _ in range(2):
        write_shared(tmp_path / "a" / "model", b"weights", tmp_path / "pool")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
