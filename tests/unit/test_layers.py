"""Who may import whom, as `pyproject.toml` says under `tool.importlinter`: the layers, methods, reports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_point_down_and_no_package_is_outside_the_layers() -> None:
    """In a process of its own: import-linter takes over logging and the standard streams."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_at_most_three_modules_stand_beside_the_packages() -> None:
    assert len([*(ROOT / "src" / "befit").glob("*.py")]) <= 3
