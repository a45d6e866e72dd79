"""What holds for every test: one thread for each process, and without the extra `flower` its tests are left out."""

import os
from importlib.util import find_spec

# Before torch is loaded, and for the processes that tests start: several workers with all cores each slow each other
# down many times over, and the models of the tests are too small to share.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_FLOWER = ("src/befit/flower/*", "tests/unit/flower/*", "tests/integration/*flower*")
collect_ignore_glob = [] if find_spec("flwr") else list(_FLOWER)


def pytest_report_header() -> list[str]:
    return ["without the extra flower: its tests are left out"] if collect_ignore_glob else []
