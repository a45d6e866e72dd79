"""What holds for every test: one thread for each process, without the extra `flower` its tests are left out, and what
makes thousands of tests quick to collect."""

import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

# Before torch is loaded, and for the processes that tests start: several workers with all cores each slow each other
# down many times over, and the models of the tests are too small to share.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests write some ten thousand small files and throw them away: in memory, where the system has plenty for that.
_MEMORY, _ENOUGH = "/dev/shm", 4 * 2**30
if os.path.isdir(_MEMORY) and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC and disk_usage(_MEMORY).free > _ENOUGH:
    os.environ.setdefault("TMPDIR", _MEMORY)

_FLOWER = ("src/befit/flower/*", "tests/unit/flower/*", "tests/integration/*flower*")
collect_ignore_glob = [] if find_spec("flwr") else list(_FLOWER)


def pytest_report_header() -> list[str]:
    return ["without the extra flower: its tests are left out"] if collect_ignore_glob else []


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Doctests are looked for where there are any."""
    found = yield
    if any(isinstance(one, DoctestModule) for one in found) and ">>>" not in file_path.read_text(encoding="utf-8"):
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


def pytest_sessionstart() -> None:
    """What is collected stays to the end: nothing of it is garbage, and nothing of it is looked through for any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected is frozen. What is left is little, so Python would look through all of it at every turn."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
