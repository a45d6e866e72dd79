"""Who may import whom, as `pyproject.toml` says under `tool.importlinter`: the layers, methods, reports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def test_imports_point_down_and_no_package_is_outside_the_layers() -> None:
    """In a process of its own: import-linter configures logging, and silences the loggers that exist."""
    lint = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_at_most_three_modules_stand_beside_the_packages() -> None:
    assert len([*(ROOT / "src" / "befit").glob("*.py")]) <= 3
