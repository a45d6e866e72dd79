"""docs/fidelity.md as data: the rows of its tables, paper by paper."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
ITEMS = ("item of the paper", "here", "checked against", "test")
NUMBERS = ("number", "in the paper", "paper", "ours", "difference", "test")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_FIGURE = re.compile(r"^([+-]?[\d,]+(?:\.\d+)?)( .*)?$")


@dataclass(frozen=True)
class Row:
    """A row of a table; `cells` are by the words of the table's head."""

    paper: str
    head: tuple[str, ...]
    cells: dict[str, str]

    @property
    def name(self) -> str:
        return self.cells[self.head[0]]

    @property
    def tests(self) -> list[tuple[str, str]]:
        """File and function of every test that the row names."""
        return TEST.findall(self.cells["test"])


@cache
def rows(head: tuple[str, ...]) -> tuple[Row, ...]:
    """All rows of the tables with this head, in the order of the page. Raises ValueError for a row of another width."""
    found: list[Row] = []
    paper, current = "", None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paper = line[3:].strip()
        if not line.startswith("|"):
            current = None
            continue
        if line.startswith("|---"):
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if current is None:
            current = cells
        elif len(cells) != len(current):
            raise ValueError(f"{PAGE.name}: {len(cells)} cells below a head of {len(current)}: {line}")
        elif current == head:
            found.append(Row(paper, head, dict(zip(head, cells, strict=True))))
    return tuple(found)


def difference(paper: str, ours: str) -> str:
    """Of two numbers, with our decimals: "none" where ours rounds to the paper's digits, "-" where one is missing."""
    if "-" in (paper, ours):
        return "-"
    if paper == ours:
        return "none"
    (theirs, unit), (mine, _) = _parts(paper), _parts(ours)
    if mine.quantize(theirs, ROUND_HALF_UP) == theirs:
        return "none"
    change = mine - theirs
    return f"{change:+}" + (" points" if unit == " %" else unit)


def _parts(text: str) -> tuple[Decimal, str]:
    match = _FIGURE.match(text)
    if match is None:
        raise ValueError(f"{PAGE.name}: {text!r} is no number, so the difference has to be in words")
    return Decimal(match[1].replace(",", "")), match[2] or ""
