"""One table in every form: the same cells, escaped as each form needs it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from befit.cli.output import show_table
from befit.core.metrics import Measure
from befit.report.numbers import MINUS, NOTHING
from befit.report.table import BYTES, Cell, Table, difference, html, latex, markdown, score

ROWS = [
    ["a_1", Cell(0.5, score("accuracy"), 0.012, bold=True), Cell(-0.02, difference("accuracy"), mark="loss"), 3],
    ["<b>", Cell(None, score("accuracy")), Cell(2048, BYTES), None],
]
TABLE = Table("T & U", ["run", ("up", "x"), ("up", "y"), ("down", "x")], ROWS, "First.\n\nSecond < third.")


def test_cells_are_numbers_with_units_spread_and_nothing() -> None:
    assert TABLE.texts == [["a_1", "50.0% ± 1.2", f"{MINUS}2.0", "3"], ["<b>", NOTHING, "2.05 kB", NOTHING]]
    assert TABLE.titles == ["run", "up, x", "up, y", "down, x"] and TABLE.is_numeric(1) and not TABLE.is_numeric(0)


def test_markdown_and_html_escape_and_mark_cells() -> None:
    assert f"| a\\_1 | **50.0% ± 1.2** | {MINUS}2.0 | 3 |" in markdown(TABLE)
    page = html(TABLE)
    assert '<td class="bold">50.0% ± 1.2</td>' in page and f'<td class="loss">{MINUS}2.0</td>' in page
    assert "&lt;b&gt;" in page and "<b>" not in page and 'aria-label="T &amp; U"' in page


def test_latex_names_percent_once_and_spans_outer_labels() -> None:
    text = latex(TABLE)
    assert r" & \multicolumn{2}{c}{up} & \multicolumn{1}{c}{down} \\" in text
    assert r"run & x (\%) & y & x \\" in text and r"a\_1 & \textbf{50.0} $\pm$ 1.2 & $-$2.0 & 3 \\" in text
    assert r"\caption{T \& U. First. Second $<$ third.}" in text and r"\label{tab:t-u}" in text


def test_the_screen_shows_a_limited_number_of_rows_and_nothing_of_an_empty_table() -> None:
    console = Console(width=90, record=True, file=io.StringIO())
    show_table(console, TABLE, limit=1)
    shown = console.export_text()
    assert "50.0% ± 1.2" in shown and "2.05 kB" not in shown and "and 1 more, in the report" in shown
    show_table(console, Table("empty", ["a"], []))
    assert console.export_text() == ""


@pytest.mark.parametrize("name", ["loss", "loss r4", "loss of ar", "loss r4 of a of r2", "loss of ", "examples of x y"])
def test_a_measure_is_read_from_its_name(name: str) -> None:
    assert str(Measure.named(name)) == name


def test_a_bracket_that_begins_a_row_of_latex_is_no_option_of_the_line_before() -> None:
    text = latex(Table("Runs", ["run", "of"], [["[alone]", "a|b [1]"], ["[w=0.5] FedIT", "c"]]))
    assert "\\midrule\n{[}alone] & a\\textbar{}b [1] \\\\\n{[}w=0.5] FedIT & c" in text


def test_a_terminal_shows_the_brackets_of_a_title() -> None:
    screen = io.StringIO()
    show_table(
        Console(file=screen, width=60), Table("Differences from [alone]", ["run"], [["[a] of a rather long name"]])
    )
    assert "Differences from [alone]" in screen.getvalue() and "[a]" in screen.getvalue()
