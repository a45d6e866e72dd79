"""report.md: the report without its plots, for terminals, pull requests and archives."""

from __future__ import annotations

from befit.report.headline import headline_sentences
from befit.report.numbers import plain
from befit.report.record import RunRecord
from befit.report.sections import Section, environment_table, sections_above, sections_below
from befit.report.table import Table, escape_markdown, markdown
from befit.report.words import facts


def render_markdown(record: RunRecord) -> str:
    """The whole report as GitHub-flavoured Markdown. Names and reasons are escaped; they come from outside."""
    results = record.results
    first, *rest = map(escape_markdown, headline_sentences(results))
    parts = [f"# {escape_markdown(str(results.get('name') or results['method']))}", f"**{first}**", " ".join(rest)]
    parts += ["\n".join(f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in facts(results))]
    for section in [*sections_above(record), *sections_below(record)]:
        parts += _lines(section)
    parts += section_lines(environment_table(record.environment))
    if record.config:
        parts += ["## Configuration", "\n".join("    " + plain(line) for line in record.config.splitlines())]
    return "\n\n".join(part for part in parts if part) + "\n"


def section_lines(table: Table, level: int = 2) -> list[str]:
    """A table below its title and above its note; nothing without rows."""
    title = f"{'#' * level} {escape_markdown(plain(table.title))}"
    return [title, markdown(table), *map(escape_markdown, table.paragraphs)] if table else []


def _lines(section: Section) -> list[str]:
    first, *others = section.filled_tables
    lines = [f"## {escape_markdown(section.title)}", escape_markdown(plain(section.text)), *section_lines(first)[1:]]
    for table in others:
        if table.detail:
            title = f"<details><summary>{escape_markdown(plain(table.title))}</summary>"
            lines += [title, *section_lines(table)[1:], "</details>"]
        else:
            lines += section_lines(table, 3)
    return [*lines, *map(escape_markdown, section.closing.split("\n\n"))]
