"""What commands print: people's text and tables, or JSON and nothing else on standard output."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["bytes_text", "duration_text", "make_table", "messages", "only_json", "print_json", "screen", "warnings_to"]


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
    shown: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in shown:
                shown.add(text)
                console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

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
    headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", wrap: int | None = None
) -> Table:
    """A table in befit's look: numbers to the right, text to the left.

    Headers break between words, cells only in column `wrap`.
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
    for index, header in enumerate(headers):
        cells = [str(row[index]) for row in rows]
        numeric = index > 0 and bool(cells) and all(_is_number(cell) for cell in cells)
        whole = max(map(len, [*header.split(), *cells]), default=0)
        table.add_column(
            header,
            justify="right" if numeric else "left",
            min_width=None if index == wrap else whole,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # Text: a client called [red] is not markup
    return table


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
