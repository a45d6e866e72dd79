"""What commands print: people's text and tables, or JSON and nothing else on standard output."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table as RichTable
    from rich.text import Text

    from befit.report.table import Table

__all__ = [
    "Imports",
    "duration_text",
    "each_warning",
    "fit_headers",
    "load_imports",
    "make_table",
    "messages",
    "only_json",
    "print_error",
    "print_json",
    "print_table",
    "print_warning",
    "screen",
    "show_table",
    "warnings_to",
]

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="FILE|MODULE", help="Python with methods, benchmarks or tasks of your own; repeatable."
    ),
]
GAP = 2  # columns between two columns
WRAPPED = 24  # room that a column of prose gets, at least
SQUEEZED = 16  # or, where the table would be in pieces otherwise


def load_imports(imports: Sequence[str] | None) -> None:
    """Load what `--import` names, whose paths count from the current folder. Raises ConfigError."""
    from befit.core.plugins import load_plugins, resolve_plugins

    load_plugins(resolve_plugins(imports or (), Path.cwd()), "--import")


def screen() -> Console:
    """Standard output, for results."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def messages() -> Console:
    """Standard error, for progress, warnings and mistakes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document, indented. NaN and infinity, which JSON lacks, become null."""
    sys.stdout.write(json.dumps(_strict(value), indent=2, ensure_ascii=False) + "\n")


def print_error(error: Exception) -> None:
    """What `--json` prints instead of results: the kind of error, its message, and the problems one by one."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    problems = list(getattr(error, "problems", [message]))  # a configuration's are several
    print_json({"error": {"kind": type(error).__name__, "message": message, "problems": problems}})


@contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send what any library prints meanwhile to standard error, so that a pipe reads pure JSON."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def warnings_to(console: Console, but: Sequence[str] = ()) -> Iterator[None]:
    """Show befit's warnings above any live display, each once, but not of the loggers named in `but`."""
    with each_warning(lambda text: print_warning(console, text), but):
        yield


def print_warning(console: Console, text: str) -> None:
    console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)


@contextmanager
def each_warning(tell: Callable[[str], None], but: Sequence[str] = ()) -> Iterator[None]:
    """Call `tell` with each of befit's warnings, once, but not those of the loggers named in `but`."""
    told: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in told:
                told.add(text)
                tell(text)

    handler = Handler(logging.WARNING)
    handler.addFilter(lambda record: record.name not in but)
    logger = logging.getLogger("befit")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def print_table(
    console: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    wrap: int | Sequence[int] = (),
) -> None:
    """Print a table for this console's width; where one column is too long for it, wider than the console."""
    console.print(make_table(headers, rows, title, wrap, console.width), crop=False)


def show_table(console: Console, table: Table, limit: int | None = None) -> None:
    """A table with its title and note, and how many rows more than `limit` there are; nothing without rows."""
    if not table:
        return
    bold = {(i, j) for i in range(len(table.rows)) for j in range(len(table.headers)) if table.is_bold(i, j)}
    console.print(make_table(table.titles, table.texts[:limit], table.title, 0, console.width, bold=bold), crop=False)
    if limit is not None and len(table.rows) > limit:
        console.print(f"and {len(table.rows) - limit} more, in the report", style="dim")
    for paragraph in table.paragraphs:
        console.print(paragraph, style="dim", markup=False)


def make_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    wrap: int | Sequence[int] = (),
    width: int | None = None,
    bold: Collection[tuple[int, int]] = (),
) -> Group:
    """A table in befit's look, numbers to the right, text to the left: every number and name of it is whole.

    Cells are broken only in the columns `wrap`, and headers between words where `width` (the terminal's) demands it.
    Columns that do not fit beside each other go below, with the first column (the first two where that one's cells
    repeat) before them again. `bold` are cells, by row and column.
    """
    from rich.cells import cell_len
    from rich.console import Group
    from rich.text import Text  # a client called [red] is not markup

    prose = {wrap} if isinstance(wrap, int) else set(wrap)
    texts = [[str(cell) for cell in row] for row in rows]
    width = screen().width if width is None else width
    longest = [max((cell_len(row[index]) for row in texts), default=0) for index in range(len(headers))]
    keys = [0, 1] if len(headers) > 2 and len({row[0] for row in texts}) < len(texts) else [0]
    for prose_room in (WRAPPED, SQUEEZED, WRAPPED):  # narrow prose only where that keeps the table in one piece
        least = [min(size, prose_room) if one in prose else size for one, size in enumerate(longest)]
        if 0 in prose:  # names: between words only
            least[0] = max(least[0], *(cell_len(word) for row in texts for word in row[0].split()), 0)
        tables = _beside(headers, least, keys, width)
        if len(tables) == 1:
            break
    parts = []
    for columns in tables:
        room = width - GAP * len(columns)
        shown = fit_headers([headers[one] for one in columns], [least[one] for one in columns], room)
        widths = [max(least[one], *map(len, header.split("\n"))) for one, header in zip(columns, shown, strict=True)]
        wanted = {place: longest[one] for place, one in enumerate(columns) if one in prose}
        _widen(widths, wanted, room - sum(widths))
        cells = [[Text(row[j], "bold" if (i, j) in bold else "") for j in columns] for i, row in enumerate(texts)]
        parts.append(_part(shown, cells, widths, "" if parts else title))
    return Group(*[one for part in parts for one in ("", part)][1:])


def _beside(headers: Sequence[str], cells: Sequence[int], keys: list[int], width: int) -> list[list[int]]:
    """The columns of each of the tables, one below the other, that show columns of cells this wide."""
    needs = [GAP + max([cell, *map(len, header.split())]) for header, cell in zip(headers, cells, strict=True)]
    tables = [list(keys)]
    for index in range(len(keys), len(headers)):
        full = sum(needs[one] for one in (*tables[-1], index)) > width
        if full and len(tables[-1]) > len(keys):
            tables.append(list(keys))
        tables[-1].append(index)
    return tables


def _widen(widths: list[int], wanted: Mapping[int, int], spare: int) -> None:
    """Share what room is left among the columns of prose, the shortest first, none wider than it wants."""
    left = len(wanted)
    for place in sorted(wanted, key=lambda one: wanted[one] - widths[one]):
        more = max(min(wanted[place] - widths[place], spare // left), 0)
        widths[place] += more
        spare, left = spare - more, left - 1


def _part(headers: Sequence[str], rows: Sequence[Sequence[Text]], widths: Sequence[int], title: str) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_header=any(headers),
        width=sum(widths) + GAP * len(widths) - 1,  # given, so that rich takes nothing from a column
    )
    for index, (header, width) in enumerate(zip(headers, widths, strict=True)):
        numeric = index > 0 and bool(rows) and all(_is_number(row[index].plain) for row in rows)
        table.add_column(Text(header), justify="right" if numeric else "left", width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def fit_headers(headers: Sequence[str], cells: Sequence[int], room: int) -> list[str]:
    """Headers with line breaks, so that columns of cells this wide fit into `room` together if they can.

    >>> fit_headers(["client", "test examples"], [9, 3], 18)
    ['client', 'test\\nexamples']
    """
    least = [max([width, *map(len, header.split())]) for header, width in zip(headers, cells, strict=True)]
    widths = [max(len(header), width) for header, width in zip(headers, cells, strict=True)]
    while sum(widths) > room and widths != least:
        widest = max(range(len(widths)), key=lambda index: widths[index] - least[index])
        widths[widest] -= 1
    return ["\n".join(textwrap.wrap(header, max(width, 1))) for header, width in zip(headers, widths, strict=True)]


def duration_text(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> duration_text(75), duration_text(3661)
    ('1:15', '1:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _is_number(cell: str) -> bool:
    text = str(cell).strip().lstrip("+-\N{MINUS SIGN}")
    return text[:1].isdigit() or text in ("", "-", "\N{EN DASH}", "\N{EM DASH}")


def _strict(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    return value
