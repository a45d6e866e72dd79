"""Every registered method has a page in docs/methods that names its options with their defaults, and no other has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from befit.core.schema import plain
from befit.data.registry import BENCHMARKS
from befit.protocol.describe import describe
from befit.protocol.registry import get_method, method_names

PAGES = Path(__file__).parents[3] / "docs" / "methods"
SECTIONS = ["Equations", "What travels", "Options", "Sources", "Deviations", "When to use it, and when not"]
# Other tests and users register methods of their own, which have no page here.
METHODS = [name for name in method_names() if get_method(name).factory.__module__.startswith("befit.methods.")]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands below a heading that begins with `title`, up to the next one."""
    found = re.search(rf"^## {title}[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1].strip()


def options(text: str) -> dict[str, Any]:
    """Name -> default of the rows of the table of options."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]{10,} \|$", section(text, "Options"), re.MULTILINE)
    return {name: json.loads(default) for name, default in rows}


def test_pages_and_methods_are_the_same() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(["README", *METHODS])


def test_the_changelog_counts_what_there_is() -> None:
    told = (PAGES.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    benchmarks = [BENCHMARKS.find(name, "benchmark.name") for name in BENCHMARKS.names()]
    ours = [one.summary for one in benchmarks if one.build.__module__.startswith("befit.data.")]
    offline = [summary for summary in ours if "needs the data" not in summary]
    assert f"{len(METHODS)} [methods]" in told and f"{len(ours)} [benchmarks]" in told
    assert len(offline) == 11 and len(ours) - len(offline) == 20
    assert "Eleven need no download" in told and "other twenty" in told


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_its_sections_and_its_source(name: str) -> None:
    text, entry = page(name), get_method(name)
    assert text.startswith("# ") and f"(`{name}`)" in text.splitlines()[0]
    assert entry.title in text.splitlines()[0]
    assert entry.paper.removeprefix("arXiv:") in text
    for title in SECTIONS:
        assert len(section(text, title)) > 60, title


@pytest.mark.parametrize("name", METHODS)
def test_a_page_names_every_option_with_its_default_and_no_other(name: str) -> None:
    assert options(page(name)) == {one.name: plain(one.default) for one in get_method(name).parameters}


@pytest.mark.parametrize("name", METHODS)
def test_what_travels_on_a_page_is_what_the_method_declares(name: str) -> None:
    """The selectors of `befit explain`, word for word."""
    described: Any = describe(get_method(name).factory())
    text = section(page(name), "What travels")
    for way in ("up", "down"):
        if described[way] == "nothing":
            assert "Nothing, in either direction" in text
        else:
            assert f"`{described[way]}`" in text


@pytest.mark.parametrize("name", METHODS)
def test_the_index_links_every_page(name: str) -> None:
    assert f"| [`{name}`]({name}.md) |" in page("README")
