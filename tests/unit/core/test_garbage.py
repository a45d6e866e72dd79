"""How often Python looks for garbage in a process of befit's own."""

import gc
import sys
from collections.abc import Iterator

import pytest

from befit.cli.main import main


@pytest.fixture
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*before)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="may ignore the number")
def test_the_command_line_looks_through_everything_a_tenth_as_often(
    usual: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["befit", "--version"])
    with pytest.raises(SystemExit):
        main()
    young, middle, old = usual
    assert gc.get_threshold() == (young, middle, 10 * old) and "befit" in capsys.readouterr().out
