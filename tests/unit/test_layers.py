"""Who may import whom, as `pyproject.toml` says under `tool.importlinter`: the layers, methods, reports."""

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def test_imports_point_down_and_no_package_is_outside_the_layers(capsys) -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0, capsys.readouterr().out


def test_at_most_three_modules_stand_beside_the_packages() -> None:
    assert len([*(ROOT / "src" / "befit").glob("*.py")]) <= 3
