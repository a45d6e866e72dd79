"""What commands print: people's text and tables, or JSON and nothing else on standard output."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "bytes_text",
    "duration_text",
    "each_warning",
    "fit_headers",
    "make_table",
    "messages",
    "only_json",
    "print_error",
    "print_json",
    "print_warning",
    "screen",
    "warnings_to",
]

GAP = 2  # columns between two columns
WRAPPED = 24  # room that a column of prose gets at least


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
    """What `--json` prints instead of results: the kind of error, its message, and a configuration's problems."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    problems = getattr(error, "problems", None)
    more = {} if problems is None else {"problems": list(problems)}
    print_json({"error": {"kind": type(error).__name__, "message": message, **more}})


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


def make_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    wrap: int | None = None,
    width: int | None = None,
) -> Table:
    """A table in befit's look: numbers to the right, text to the left.

    Cells are broken only in column `wrap`, and headers between words where `width` (the terminal's) demands it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_header=any(headers),
    )
    columns = [[str(row[index]) for row in rows] for index in range(len(headers))]
    narrow = [max(map(len, cells), default=0) for cells in columns]
    if wrap is not None:
        narrow[wrap] = min(narrow[wrap], WRAPPED)
    room = (screen().width if width is None else width) - GAP * len(headers)
    for index, (header, cells) in enumerate(zip(fit_headers(headers, narrow, room), columns, strict=True)):
        numeric = index > 0 and bool(cells) and all(_is_number(cell) for cell in cells)
        table.add_column(Text(header), justify="right" if numeric else "left", no_wrap=index != wrap, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # Text: a client called [red] is not markup
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


def bytes_text(count: float) -> str:
    """Bytes with decimal prefixes.

    >>> bytes_text(0), bytes_text(2048), bytes_text(1_250_000)
    ('0 B', '2.0 kB', '1.2 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


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
