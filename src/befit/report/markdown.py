"""report.md: the report without its plots, for terminals, pull requests and archives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from befit.report import tables
from befit.report.comparison import run_title
from befit.report.groups import GROUP_NOTE, group_tables
from befit.report.headline import headline_sentences
from befit.report.newcomers import (
    NEWCOMER_NOTE,
    newcomer_sentences,
    newcomer_summary_table,
    newcomer_table,
    newcomers_of,
)
from befit.report.numbers import count_text, plain
from befit.report.outbound import outbound_groups, outbound_totals
from befit.report.record import RunRecord, export_note, written_files
from befit.report.table import Table, escape_markdown, markdown
from befit.report.words import (
    COMMUNICATION_NOTE,
    COST_NOTE,
    GROUPS_SHOWN,
    OVER_TIME_NOTE,
    client_notes,
    facts,
    failure_note,
    group_title,
    outbound_note,
)

__all__ = ["escape", "flat", "markdown_table", "render_markdown"]


def render_markdown(record: RunRecord) -> str:
    """The whole report as GitHub-flavoured Markdown. Names and reasons are escaped; they come from outside."""
    results = record.results
    first, *rest = headline_sentences(results)
    parts = [f"# {escape(str(results.get('name') or results['method']))}", f"**{escape(first)}**"]
    parts += [escape(" ".join(rest))] * bool(rest)
    parts += ["", "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in facts(results))]
    parts += _section("Summary", tables.summary_table(results))
    parts += _section("Clients", tables.client_table(results), "\n\n".join(client_notes(results)))
    parts += _section("Own and other clients' examples", tables.over_time_table(results), OVER_TIME_NOTE)
    parts += _groups(results)
    parts += _newcomers(results)
    parts += _section("Failures", tables.failure_table(results), failure_note(results))
    parts += _section("Communication", tables.communication_table(results), COMMUNICATION_NOTE)
    parts += _section("Compute and memory", tables.cost_table(results), COST_NOTE)
    parts += _section(f"What the stages of {run_title(results['method'])} took", tables.stage_table(record.ledger))
    parts += _section("Mean over rounds", tables.curve_table(results))
    parts += _section("Diagnostics", tables.diagnostics_table(results))
    parts += _outbound(record)
    parts += _environment(record)
    parts += ["## Files", markdown_table((["what", "where"], [list(row) for row in written_files(record)]))]
    parts += [escape(export_note(record))]
    if record.missing:
        parts += [f"Not in this directory, and so not in this report: {', '.join(record.missing)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and the HTML inside it show as it is.

    >>> escape("a|b *c* <script>")
    'a\\\\|b \\\\*c\\\\* &lt;script&gt;'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|~$])", r"\\\1", text)


def _section(title: str, table: tables.Table, note: str = "") -> list[str]:
    return [f"## {escape(title)}", markdown_table(table), escape(note)] if table[1] else []


def section(table: Table, level: int = 2) -> list[str]:
    """A table below its title and above its note; nothing without rows."""
    title = f"{'#' * level} {escape_markdown(plain(table.title))}"
    return [title, markdown(table), *map(escape_markdown, table.paragraphs)] if table else []


def markdown_table(table: tables.Table) -> str:
    """A table in GitHub-flavoured Markdown, cells escaped, numbers to the right."""
    headers, rows = table
    sides = ("---:" if index and tables.is_numeric(rows, index) else "---" for index in range(len(headers)))
    line = "| " + " | ".join(sides) + " |"
    return "\n".join([_row(headers), line, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"


def _newcomers(results: dict[str, Any]) -> list[str]:
    summary = newcomer_summary_table(results)
    if not summary[1]:
        return []
    return [
        "## Newcomers",
        escape(" ".join(newcomer_sentences(results))),
        markdown_table(summary),
        markdown_table(newcomer_table(results)),
        NEWCOMER_NOTE,
        *_groups(newcomers_of(results), "newcomers"),
    ]


def _groups(results: dict[str, Any], who: str = "clients") -> list[str]:
    parts = []
    for what, table, wins in group_tables(results, who):
        parts += [f"### {escape(what.capitalize())}", escape(wins), markdown_table(table)]
    return [*parts, GROUP_NOTE] if parts else []


def _outbound(record: RunRecord) -> list[str]:
    if not record.outbound:
        return []
    groups = outbound_groups(record.outbound)
    parts = [
        "## What left each client",
        escape(outbound_note(record)),
        markdown_table(outbound_totals(record.outbound)),
    ]
    for group in groups[:GROUPS_SHOWN]:
        parts += [
            f"<details><summary>{_html(group_title(group.clients))}</summary>",
            markdown_table(group.table),
            "</details>",
        ]
    if hidden := groups[GROUPS_SHOWN:]:
        parts += [
            f"{count_text(len(hidden), 'further list')} of {sum(len(g.clients) for g in hidden)} clients: "
            "see outbound.json."
        ]
    return parts


def _environment(record: RunRecord) -> list[str]:
    parts: list[str] = []
    if record.environment:
        parts += ["## Environment", markdown_table((["what", "value"], flat(record.environment)))]
    if record.config:
        text = "\n".join("    " + plain(line) for line in record.config.splitlines())
        parts += ["## Configuration", text]
    return parts


def flat(values: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """A nested mapping as rows of dotted name and value."""
    rows: list[list[str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += flat(value, f"{name}.") if isinstance(value, dict) else [[plain(name), plain(str(value))]]
    return rows


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
