"""Fixtures for all tests, and what every process that runs tests does first.

Tests are about the bits of a CPU, so a GPU is hidden from them; those in tests/gpu are for one, see `make test-gpu`.

Nothing heavy is imported here, since the process that hands out the tests imports this too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

# The same examples on every machine, and none that fails because the machine was busy; more in `make test-slow`.
hypothesis.settings.register_profile("befit", derandomize=True, deadline=None, database=None, max_examples=25)
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, database=None, max_examples=400)
hypothesis.settings.load_profile("befit")


def pytest_configure(config: pytest.Config) -> None:
    """Before anything asks for a GPU; processes that hand tests out or are started by them have it from here."""
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection(session: pytest.Session) -> None:
    """Before a module of tests is imported, in a process that runs them itself."""
    if session.config.getoption("dist", "no") == "no":
        from tests.quicker import make_quicker

        make_quicker()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what waits for a network for a minute, while others have work: last, it would be waited for."""
    items.sort(key=lambda item: "tests/integration/test_flower.py" not in item.nodeid)


@pytest.fixture
def site() -> Callable[..., Any]:
    """Makes sites; see `make_site` in tests/tiny.py."""
    from tests.tiny import make_site

    return make_site


@pytest.fixture(params=("vit", "bert", "llama", "gpt2"))
def kind(request: pytest.FixtureRequest) -> str:
    """Every architecture in turn."""
    return request.param
