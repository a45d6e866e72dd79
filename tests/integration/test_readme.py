"""The README says what is so: its code runs and its commands exist; tables on pages are the code's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from tests.pages import blocks
from tests.processes import PATIENCE, befit, call, program

ROOT = Path(__file__).parents[2]
BLOCKS = blocks(ROOT / "README.md")
SHORT = ("limit={clients: 3, records: 24, rounds: 2}", "baselines=[local]", "evaluate.every=0", "report.plots=false")


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=PATIENCE)


def test_the_quickstart_runs_and_prints_every_client(tmp_path: Path) -> None:
    """With two rounds where it has ten, few of the digits, and no plots."""
    code = next(block for language, block in BLOCKS if language == "python")
    less = '"limit": {"records": 24, "rounds": 2}, "report": {"plots": False}'
    code = code.replace('"benchmark": {', f'{less}, "benchmark": {{')
    done = call(program, code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["client-00", "client-01", "client-02"]
    assert (tmp_path / lines[-1]).exists()


def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    (block,) = [text for language, text in BLOCKS if not language and "befit methods" in text]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    Image.fromarray(np.full((8, 8), 128, dtype=np.uint8)).save(tmp_path / "digit.png")
    commands = [line.split("#")[0].strip() for line in block.splitlines()]
    seen: set[str] = set()
    for command in filter(None, commands):
        words = shlex.split(command)
        assert words[0] == "befit"
        seen.add(words[1])
        shorter = SHORT if words[1] == "run" else ()
        done = call(befit, *words[1:], *shorter, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert seen == {"check", "run", "predict", "export", "methods", "benchmarks", "explain", "cost"}
    assert (tmp_path / "for-the-hospital" / "adapter_model.safetensors").exists()


@pytest.fixture(scope="module")
def updater() -> ModuleType:
    """scripts/update_readme.py."""
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "scripts" / "update_readme.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = ("docs/methods/README.md", "docs/security.md", "docs/privacy.md", "docs/configuration.md")
SCHEMAS = ("configs/schema.json", "studies/schema.json")


def print_updated() -> None:
    """What the script makes of the pages, and the schemas."""
    sys.path.insert(0, str(ROOT / "scripts"))
    script = importlib.import_module("update_readme")
    texts = {page: script.updated((ROOT / page).read_text()) for page in PAGES}
    print(json.dumps(texts | {path: script.schema_text(path) for path in SCHEMAS}))


@pytest.fixture(scope="module")
def updated() -> dict[str, str]:
    """Made in a process of its own: other tests may have registered methods in this one."""
    done = call(print_updated, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_the_codes(page: str, updater: ModuleType, updated: dict[str, str]) -> None:
    assert page in updater.PAGES
    assert updated[page] == (ROOT / page).read_text(), "run: python scripts/update_readme.py"


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_schemas_beside_configurations_and_studies_are_the_codes(path: str, updated: dict[str, str]) -> None:
    assert updated[path] == (ROOT / path).read_text(), "run: python scripts/update_readme.py"


def test_every_table_is_on_a_page(updater: ModuleType) -> None:
    pages = "".join((ROOT / page).read_text() for page in updater.PAGES)
    assert all(pages.count(f"<!-- {name} -->") == pages.count(f"<!-- /{name} -->") == 1 for name in updater.TABLES)


def test_every_test_that_the_security_page_names_is_there() -> None:
    """A claim on it is held by a test, by file and, after `::`, by name."""
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text))
    assert len(named) > 10
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), (path, name)
        assert (ROOT / path).exists(), path


def test_every_method_is_checked_by_a_golden_test_that_plays_it(updater: ModuleType) -> None:
    """What a test says in `CHECKED` it also names where it builds the method."""
    links = updater.checked_against()
    assert links.keys() == {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    for name, oracles in links.items():
        paths = re.findall(r"\(../../(tests/golden/\w+\.py)\)", ", ".join(oracles))
        assert any((ROOT / path).read_text().count(f'"{name}"') > 1 for path in paths), name


@pytest.mark.parametrize("target", ["demo", "test", "install", "check"])
def test_the_makefile_has_what_the_readme_promises(target: str) -> None:
    done = run("make", "--dry-run", target, cwd=ROOT)
    assert done.returncode == 0, done.stderr
