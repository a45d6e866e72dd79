"""A table of typed cells, and how it is written: as plain texts (the terminal's), in Markdown, in HTML and in LaTeX.

A table is made once; every renderer writes the same cells.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape as escape_html
from typing import Any

from befit.core.metrics import Spread
from befit.core.storage import finite
from befit.report.numbers import (
    MINUS,
    NOTHING,
    bytes_text,
    decimal_text,
    gain_text,
    p_text,
    plain,
    score_text,
    seconds_text,
)


@dataclass(frozen=True)
class Unit:
    """How a quantity is written: its value, and the size of its spread."""

    value: Callable[[float | None], str] = decimal_text
    spread: Callable[[float | None], str] = decimal_text


def score(metric: str) -> Unit:
    """Scores in a metric; shares are in percent, and their spread is in points."""
    return Unit(partial(score_text, metric=metric), partial(gain_text, metric=metric, signed=False))


def difference(metric: str) -> Unit:
    """Differences of scores, with their sign; of shares in points."""
    return Unit(partial(gain_text, metric=metric), partial(gain_text, metric=metric, signed=False))


def deviation(metric: str) -> Unit:
    """Sizes of differences of scores, such as standard deviations and errors."""
    return Unit(partial(gain_text, metric=metric, signed=False))


def decimals(digits: int) -> Unit:
    """Numbers with as many decimals."""

    def write(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.{digits}f}"

    return Unit(write, write)


_WRAPPED = 60  # letters beyond which a page breaks a cell of text into lines
BYTES, SECONDS, P_VALUE, PLAIN = Unit(bytes_text), Unit(seconds_text), Unit(p_text), Unit()


@dataclass(frozen=True)
class Cell:
    """One cell.

    value   a number, a text, or None where there is nothing to tell
    unit    how the number and its spread are written
    spread  standard deviation, standard error or half an interval, in the value's unit
    bold    whether it stands out, such as the best of its table
    note    what is written behind the number, such as the paper's own
    mark    "gain", "loss" or "unclear": the colour that a page gives it
    """

    value: float | str | None
    unit: Unit = PLAIN
    spread: float | None = None
    bold: bool = False
    note: str = ""
    mark: str = ""

    @property
    def text(self) -> str:
        """The value alone."""
        return plain(self.value) if isinstance(self.value, str) else self.unit.value(self.value)

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.unit.spread(self.spread)}"
        return f"{self.text}{spread}{f' {plain(self.note)}' if self.note else ''}"


def mean_cell(over: Spread | None, metric: str, bold: bool = False, note: str = "") -> Cell:
    """A mean score with its standard deviation; None is nothing to tell.

    >>> str(mean_cell({"mean": 0.5, "sd": 0.012, "n": 2}, "accuracy")), str(mean_cell(None, "accuracy"))
    ('50.0% ± 1.2', '–')
    """
    if over is None:
        return Cell(None, note=note)
    return Cell(over["mean"], score(metric), over["sd"], bold, note)


@dataclass(frozen=True)
class Table:
    """A table with a title; the first column says what a row is.

    headers  one for each column: a text, or a tuple of the labels above each other, the outermost first
    rows     cells; texts and numbers stand for plain ones
    note     what the numbers are, in paragraphs with an empty line between them
    detail   whether it is left out on the screen, being long
    last     whether the last row is the one that the table is about, and stands out
    """

    title: str
    headers: Sequence[str | tuple[str, ...]]
    rows: Sequence[Sequence[Cell | str | float | None]]
    note: str = ""
    detail: bool = False
    last: bool = False

    def __bool__(self) -> bool:
        """Whether it has any row."""
        return bool(self.rows)

    @cached_property
    def cells(self) -> list[list[Cell]]:
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    @cached_property
    def texts(self) -> list[list[str]]:
        """Every cell as it is written."""
        return [[str(cell) for cell in row] for row in self.cells]

    @cached_property
    def titles(self) -> list[str]:
        """Every column's header in one line."""
        return [plain(header if isinstance(header, str) else ", ".join(header)) for header in self.headers]

    @property
    def paragraphs(self) -> list[str]:
        """The note's."""
        return [plain(paragraph) for paragraph in self.note.split("\n\n") if paragraph]

    def without(self, *titles: str) -> Table:
        """The table without the columns of these titles."""
        kept = [index for index, title in enumerate(self.titles) if title not in titles]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, headers=[self.headers[index] for index in kept], rows=rows)

    def column(self, title: str) -> list[str]:
        """All cells below a header."""
        return [row[self.titles.index(title)] for row in self.texts]

    def is_numeric(self, column: int) -> bool:
        """Whether every cell of a column starts with a number or has no value: such columns are set to the right.

        >>> table = Table("", ["", ""], [["a", "+1.2"], ["b", None]])
        >>> table.is_numeric(0), table.is_numeric(1)
        (False, True)
        """
        texts = (row[column] for row in self.texts)
        return all(text.lstrip(f"+{MINUS}{NOTHING}")[:1].isdigit() or text in ("", NOTHING) for text in texts)

    def is_bold(self, row: int, column: int) -> bool:
        return self.cells[row][column].bold or (self.last and row == len(self.rows) - 1)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a CSV file: a column for every name that any row has; empty where a row has none, null or no number.

    A text that a spreadsheet would take for a formula is preceded by an apostrophe: clients' names come from outside.
    """
    listed = finite(list(rows))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(name for row in listed for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_value(value) for name, value in row.items()} for row in listed)
    return buffer.getvalue()


def _csv_value(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def aligned(table: Table) -> str:
    """The table alone, in columns of plain text.

    >>> print(aligned(Table("", ["run", "mean"], [["FedIT", "81.0%"], ["Local", "9.5%"]])))
    run     mean
    FedIT  81.0%
    Local   9.5%
    """
    widths = [max(map(len, column)) for column in zip(table.titles, *table.texts, strict=True)]
    right = [index > 0 and table.is_numeric(index) for index in range(len(widths))]
    lines = (
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [table.titles, *table.texts]
    )
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """The table alone, in GitHub-flavoured Markdown: cells escaped, numbers to the right."""
    sides = ("---:" if index and table.is_numeric(index) else "---" for index in range(len(table.headers)))
    rows = [
        [f"**{escape_markdown(text)}**" if table.is_bold(i, j) else escape_markdown(text) for j, text in enumerate(row)]
        for i, row in enumerate(table.texts)
    ]
    lines = [[*map(escape_markdown, table.titles)], [*sides], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """Text that Markdown and the HTML inside it show as it is.

    >>> escape_markdown("a|b *c* <script>")
    'a\\\\|b \\\\*c\\\\* &lt;script&gt;'
    """
    return re.sub(r"([\\`*_{}\[\]|~$])", r"\\\1", escape_html(text, quote=False))


def html(table: Table) -> str:
    """The table alone, in a region that scrolls where the page is narrower."""
    numeric = [index > 0 and table.is_numeric(index) for index in range(len(table.headers))]
    head = "".join(
        f'<th scope="col"{_classes(text=not right)}>{escape_html(title)}</th>'
        for title, right in zip(table.titles, numeric, strict=True)
    )
    body = []
    for i, row in enumerate(table.texts):
        first, *others = map(escape_html, row)
        cells = [f'<th scope="row"{_classes(bold=table.is_bold(i, 0))} title="{first}">{first}</th>']
        for j, text in enumerate(others, 1):
            wraps = not numeric[j] and len(row[j]) > _WRAPPED
            classes = _classes(table.cells[i][j].mark, text=not numeric[j], wrap=wraps, bold=table.is_bold(i, j))
            cells.append(f"<td{classes}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_html(plain(table.title))}">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(body)}\n</tbody>\n</table>\n</div>\n"
    )


def _classes(*names: str, **flags: bool) -> str:
    used = [*filter(None, names), *(name for name, wanted in flags.items() if wanted)]
    return f' class="{" ".join(used)}"' if used else ""


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{EN DASH}": "--",
    "\N{MINUS SIGN}": "$-$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "<": "$<$",
    ">": "$>$",
    "*": r"$^{\ast}$",
    "|": r"\textbar{}",
}


def escape_latex(text: str) -> str:
    """
    >>> print(escape_latex("A & B_1: 50% · x"))
    A \\& B\\_1: 50\\% $\\cdot$ x
    """
    return "".join(_LATEX.get(letter, letter) for letter in plain(text))


def latex(table: Table) -> str:
    """For booktabs, with title and note as the caption. Outer labels of columns span the inner ones; where all of a
    column is in percent, its header says so, and where all columns are, the caption."""
    percent = [_is_percent(table, index) for index in range(len(table.headers))]
    everything = len(percent) > 1 and all(percent[1:])
    levels = [(header,) if isinstance(header, str) else header for header in table.headers]
    inner = [
        escape_latex((header[-1] if header else "") + " (%)" * (in_percent and not everything))
        for header, in_percent in zip(levels, percent, strict=True)
    ]
    body = [[_latex_cell(table, i, j, percent[j]) for j in range(len(row))] for i, row in enumerate(table.rows)]
    caption = " ".join(filter(None, (f"{table.title}{' (%)' * everything}.", *table.paragraphs)))
    sides = "".join("r" if index and table.is_numeric(index) else "l" for index in range(len(levels)))
    depth = max(map(len, levels), default=1)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            *(_spanning(levels[1:], level) for level in range(depth - 1)),
            *(_latex_row(line) + ("\n\\midrule" if line is inner else "") for line in (inner, *body)),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{escape_latex(caption)}}}",
            rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')}}}",
            r"\end{table}",
        ]
    )


def _latex_row(cells: Sequence[str]) -> str:
    """A line of the table. A bracket at its start would be read as an option of the line before."""
    return re.sub(r"^\[", "{[}", " & ".join(cells)) + r" \\"


def _is_percent(table: Table, column: int) -> bool:
    measured = [row[column].text for row in table.cells if row[column].unit is not PLAIN]
    return bool(measured) and all(text.endswith("%") or text == NOTHING for text in measured)


def _latex_cell(table: Table, row: int, column: int, in_percent: bool) -> str:
    cell = table.cells[row][column]
    text = cell.text.removesuffix("%") if in_percent else cell.text
    text = rf"\textbf{{{escape_latex(text)}}}" if table.is_bold(row, column) else escape_latex(text)
    return text + escape_latex(str(cell).removeprefix(cell.text))


def _spanning(columns: Sequence[tuple[str, ...]], level: int) -> str:
    """One line of outer labels of columns, each over all columns that share it and those above it."""
    cells, rules, at = [""], [], 2
    for _, group in itertools.groupby(columns, key=lambda labels: labels[: level + 1]):
        members = list(group)
        cells.append(rf"\multicolumn{{{len(members)}}}{{c}}{{{escape_latex(members[0][level])}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + len(members) - 1}}}")
        at += len(members)
    return " & ".join(cells) + r" \\" + "\n" + " ".join(rules)
