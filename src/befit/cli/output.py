"""How commands print: text and tables for people, or JSON alone on standard output."""

from __future__ import annotations

import json
import logging
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.core.errors import ConfigError
from befit.core.storage import finite
from befit.core.text import PROGRESS

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table as RichTable
    from rich.text import Text

    from befit.report.table import Table

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="FILE|MODULE", help="Python with methods, benchmarks or tasks of your own; repeatable."
    ),
]


def each_once(overrides: list[str] | None) -> list[str] | None:
    """For every argument KEY=VALUE: a key can be there once, as in YAML. Raises ConfigError."""
    values: dict[str, str] = {}
    for override in overrides or ():
        key, _, value = override.partition("=")
        if key in values:
            raise ConfigError([f"{key}: is there twice, as {values[key]} and as {value}"], "the command")
        values[key] = value
    return overrides


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the configuration, such as train.lr=3e-4 or method=fedsa.",
        callback=each_once,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Trial = Annotated[
    bool,
    typer.Option(
        "--trial",
        help="Try everything once: one seed, round and step, two clients of each family, four records for each task.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
CONFIG = "befit.config"  # of a command's context: the configuration that it was given, for messages
GAP = 2  # columns between two columns
WRAPPED = 24  # least width of a column of prose
SQUEEZED = 16  # the same, where it keeps a table in fewer pieces


def remember_config(context: typer.Context, config: Path | None) -> Path | None:
    """For every argument CONFIG: an error that is found after the file was read names it too."""
    context.meta[CONFIG] = config and str(config)
    return config


def load_imports(imports: Sequence[str] | None) -> None:
    """Load what `--import` names, whose paths count from the current folder. Raises ConfigError."""
    from befit.core.plugins import load_plugins, resolve_plugins

    load_plugins(resolve_plugins(imports or (), Path.cwd()), "--import")


def names_in(text: str | None) -> list[str] | None:
    """The names in an option that lists them with commas; None where it was not given."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def screen() -> Console:
    """Standard output, for results."""
    from befit.report.screen import Screen

    return Screen(highlight=False, soft_wrap=False)


def messages() -> Console:
    """Standard error, for progress, warnings and mistakes."""
    from befit.report.screen import Screen

    return Screen(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document, indented. NaN and infinity, which JSON lacks, become null."""
    sys.stdout.write(json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def print_error(error: BaseException) -> None:
    """Print an error as JSON instead of results: its kind, its message, and the problems one by one."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    problems = list(getattr(error, "problems", [message]))  # a configuration's are several
    print_json({"error": {"kind": type(error).__name__, "message": message, "problems": problems}})


@contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send everything that libraries print to standard error, so that a pipe reads pure JSON."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def warnings_to(console: Console, but: Sequence[str] = ()) -> Iterator[None]:
    """Show each of befit's warnings once, above any live display, except those of the loggers named in `but`."""
    with each_warning(lambda text: print_warning(console, text), but):
        yield


@contextmanager
def progress_to(console: Console) -> Iterator[None]:
    """Show what takes long before there is any other progress, such as the reading of a large file."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage(), "dim", console)

    handler, logger = Handler(), logging.getLogger(PROGRESS)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def print_warning(console: Console, text: str) -> None:
    say(f"warning: {text}", "yellow", console)


def say(text: str, style: str = "", console: Console | None = None) -> None:
    """Print a line, by default on standard output. No line break is put into a path, and nothing is read as markup."""
    (console or screen()).print(text, style=style, markup=False, soft_wrap=True)


def show_written(files: Sequence[tuple[str, Path | str]]) -> None:
    """Where results were written: what each file is, and its path."""
    screen().print("\nWritten", style="bold italic")
    for what, path in files:
        say(f"{what:22} {path}")


@contextmanager
def training(as_json: bool, quiet: bool, hint: Callable[[], str]) -> Iterator[Console]:
    """The console for progress of a command that trains; `hint` says how to go on after an interruption."""
    console = messages()
    shown = warnings_to(console, but=() if quiet else ("befit.runs.journal",))
    with only_json(as_json), shown, _stoppable(), nullcontext() if quiet else progress_to(console):
        if not quiet:
            console.print("befit is loading …", style="dim")
        try:
            yield console
        except KeyboardInterrupt as stop:
            number = stop.args[0] if isinstance(stop, _Stopped) else signal.SIGINT
            say(f"interrupted; {hint()}", "yellow", console)
            raise typer.Exit(128 + number) from None


class _Stopped(KeyboardInterrupt):
    """A signal, by its number, that asks the process to end."""


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM, which schedulers send, and SIGHUP interrupt as Ctrl-C does. A second one ends the process at once."""

    def stop(number: int, frame: object) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
        raise _Stopped(number)

    # Not what somebody else handles or, as nohup, ignores.
    signals = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # which Windows lacks
    taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def each_warning(tell: Callable[[str], None], but: Sequence[str] = ()) -> Iterator[None]:
    """Call `tell` once with each of befit's warnings, except those of the loggers named in `but`."""
    texts: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text not in texts:
                texts.add(text)
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


def show_table(console: Console, table: Table, limit: int | None = None, wrap: int | Sequence[int] = 0) -> None:
    """Print a table with its title and note, and how many rows it has beyond `limit`; nothing without rows.

    It fits the console's width; where a single column is wider than that, so is the table. `wrap` as in `make_table`.
    """
    if not table:
        return
    console.print(make_table(table, wrap, console.width, limit), crop=False)
    if limit is not None and len(table.rows) > limit:
        console.print(f"and {len(table.rows) - limit} more, in the report", style="dim")
    for paragraph in table.paragraphs:
        console.print(paragraph, style="dim", markup=False)


def make_table(table: Table, wrap: int | Sequence[int] = (), width: int = 80, limit: int | None = None) -> Group:
    """The first `limit` rows of a table for the terminal, numbers to the right, text to the left.

    Numbers and names stay whole: cells are broken only in the columns `wrap` and in those wider than half of `width`
    (the terminal's), and headers between words where it demands that. Columns that do not fit beside each other go
    below, with the first column before them again, and with the second too where cells of the first repeat.
    """
    from rich.cells import cell_len
    from rich.console import Group
    from rich.text import Text  # a client called [red] is not markup

    prose = {wrap} if isinstance(wrap, int) else set(wrap)
    headers, texts = table.titles, table.texts[:limit]
    longest = [max((cell_len(row[index]) for row in texts), default=0) for index in range(len(headers))]
    prose |= {index for index, size in enumerate(longest) if 2 * size > width}
    keys = [0, 1] if len(headers) > 2 and len({row[0] for row in texts}) < len(texts) else [0]
    choices = []
    for prose_room in (WRAPPED, SQUEEZED):  # narrow prose only where that makes fewer tables
        least = [min(size, prose_room) if column in prose else size for column, size in enumerate(longest)]
        if 0 in prose:  # names: between words only
            least[0] = max(least[0], *(cell_len(word) for row in texts for word in row[0].split()), 0)
        choices.append((_beside(headers, least, keys, width), least))
    tables, least = min(choices, key=lambda choice: len(choice[0]))
    parts: list[Any] = []
    for columns in tables:
        room = width - GAP * len(columns)
        shown = fit_headers([headers[column] for column in columns], [least[column] for column in columns], room)
        widths = [
            max(least[column], *map(len, header.split("\n"))) for column, header in zip(columns, shown, strict=True)
        ]
        wanted = {place: longest[column] for place, column in enumerate(columns) if column in prose}
        _widen(widths, wanted, room - sum(widths))
        cells = [[Text(row[j], "bold" if table.is_bold(i, j) else "") for j in columns] for i, row in enumerate(texts)]
        texts_of = {place for place, column in enumerate(columns) if column in prose}
        parts += ["", _part(shown, cells, widths, "" if parts else table.title, texts_of)]
    return Group(*parts[1:])


def _beside(headers: Sequence[str], cells: Sequence[int], keys: list[int], width: int) -> list[list[int]]:
    """The columns of each table, where columns of this width do not fit into one."""
    needs = [GAP + max([cell, *map(len, header.split())]) for header, cell in zip(headers, cells, strict=True)]
    tables = [list(keys)]
    for index in range(len(keys), len(headers)):
        full = sum(needs[column] for column in (*tables[-1], index)) > width
        if full and len(tables[-1]) > len(keys):
            tables.append(list(keys))
        tables[-1].append(index)
    return tables


def _widen(widths: list[int], wanted: Mapping[int, int], spare: int) -> None:
    """Share the spare room among the columns of prose, the shortest first, none wider than it needs."""
    left = len(wanted)
    for place in sorted(wanted, key=lambda place: wanted[place] - widths[place]):
        more = max(min(wanted[place] - widths[place], spare // left), 0)
        widths[place] += more
        spare, left = spare - more, left - 1


def _part(
    headers: Sequence[str], rows: Sequence[Sequence[Text]], widths: Sequence[int], title: str, prose: set[int]
) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(
        title=Text(title, style="bold") if title else None,  # not as markup, which brackets are
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_header=any(headers),
        width=sum(widths) + GAP * len(widths) - 1,  # given, so that rich takes nothing from a column
    )
    for index, (header, width) in enumerate(zip(headers, widths, strict=True)):
        numeric = index > 0 and index not in prose and bool(rows) and all(_is_number(row[index].plain) for row in rows)
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


def _is_number(cell: str) -> bool:
    text = str(cell).strip().lstrip("+-\N{MINUS SIGN}")
    return text[:1].isdigit() or text in ("", "-", "\N{EN DASH}", "\N{EM DASH}")
