"""Pages of the documentation, followed as a reader follows them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.processes import PATIENCE, befit, call, program


def blocks(page: Path) -> list[tuple[str, str]]:
    """Every fenced block of a page: its language and its text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def follow(
    page: Path,
    folder: Path,
    *,
    shorter: Sequence[str] = (),
    written: Callable[[Path], None] = lambda path: None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Do in `folder` what a page says, block by block; returns the commands.

    A block without a language has commands, one a line, or on two lines joined by a backslash. `text` is what they
    print, numbers and the width of columns aside, with `…` for what is left out. Any other is a file,
    whose name its first line has as a comment: `# data.py`.

    shorter  overrides of every `befit run` and `befit compare` of the page
    written  is told of each file
    environment  of programs that are neither befit nor Python
    """
    commands, printed = [], ""
    for language, block in blocks(page):
        if language == "":
            printed = ""
            for command in block.replace("\\\n", "").splitlines():
                words = shlex.split(command)
                less = shorter if words[0] == "befit" and words[1] in ("run", "compare") else ()
                printed += _run([*words, *less], folder, environment)
                commands.append(command)
        elif language == "text":
            lines = {_but_numbers(line) for line in printed.splitlines()}
            shown = [line for line in block.splitlines() if line.strip() not in ("", "…")]
            missing = [line for line in shown if _but_numbers(line) not in lines]
            assert not missing, f"{page.name}: {missing} is not in what {commands[-1]!r} prints:\n{printed}"
        else:
            name = re.match(r"# ([\w./-]+)\n", block)
            assert name, f"{page.name}: the first line of a block names its file:\n{block}"
            (folder / name[1]).write_text(block, encoding="utf-8")
            written(folder / name[1])
    return commands


def _run(words: list[str], folder: Path, environment: Mapping[str, str] | None) -> str:
    if words[:2] == ["pip", "install"]:
        return ""  # what the tests have installed
    if words[0] == "befit":
        done = call(befit, *words[1:], cwd=folder)
    elif words[0] == "python":
        done = call(program, (folder / words[1]).read_text(encoding="utf-8"), cwd=folder)
    else:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE
        )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def _but_numbers(line: str) -> str:
    return re.sub(r"[-+−]?\d[\d.,]*", "0", re.sub(r"─+", "─", " ".join(line.split())))
