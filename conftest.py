"""Without the extra `flower`, its modules and tests are left out."""

from importlib.util import find_spec

_FLOWER = ("src/befit/flower/*", "tests/unit/flower/*", "tests/integration/*flower*")
collect_ignore_glob = [] if find_spec("flwr") else list(_FLOWER)


def pytest_report_header() -> list[str]:
    return ["without the extra flower: its tests are left out"] if collect_ignore_glob else []
