"""Every example runs, says what it should, and stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import call

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def example(path: str) -> None:
    """The example with two rounds, few records, and no plots."""
    text, less = (
        Path(path).read_text(encoding="utf-8"),
        '"limit": {"records": 24, "rounds": 2}, "report": {"plots": False}',
    )
    for data in ('"benchmark": {"name": "digits"', '"data": {"task"'):
        text = text.replace(data, f"{less}, {data}")
    exec(compile(text, path, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(path: Path, tmp_path: Path) -> None:
    done = call(example, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "client-00" in done.stdout or "newcomer en-new-0" in done.stdout
    assert len(path.read_text().splitlines()) <= 60
    assert list(tmp_path.iterdir()) == []  # examples leave nothing behind
