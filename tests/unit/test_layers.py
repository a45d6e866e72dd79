"""Who may import whom, as `pyproject.toml` says under `tool.importlinter`: the layers, methods, reports; and that these
tests stand where what they test stands."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "befit"
UNIT = ROOT / "tests" / "unit"


def test_imports_point_down_and_no_package_is_outside_the_layers() -> None:
    """In a process of its own: import-linter takes over logging and the standard streams."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_at_most_three_modules_stand_beside_the_packages() -> None:
    assert len([*SOURCE.glob("*.py")]) <= 3


def folders_of(files: str, root: Path) -> set[Path]:
    return {path.parent.relative_to(root) for path in root.rglob(files)}


def test_tests_of_a_package_stand_in_the_folder_of_its_name() -> None:
    """Only packages have one, and every package with code beyond its `__init__` has tests in it."""
    assert folders_of("*.py", UNIT) <= folders_of("__init__.py", SOURCE)
    assert folders_of("[!_]*.py", SOURCE) <= folders_of("test_*.py", UNIT)
