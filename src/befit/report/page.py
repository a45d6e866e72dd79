"""report.html: one file with everything inside, no scripts, nothing fetched."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from befit.report.comparison import run_title
from befit.report.headline import FEW, headline_sentences
from befit.report.numbers import bytes_text, count_text, gain_text, plain, score_of, score_text
from befit.report.record import RunRecord
from befit.report.results import RunResults
from befit.report.sections import Section, environment_table, sections_above, sections_below
from befit.report.table import Table, html
from befit.report.tables import BY_EXAMPLES
from befit.report.words import facts


def render_page(record: RunRecord, plots: bool = True) -> str:
    """The whole page. Everything that comes from the run is escaped by the template engine; only the SVG is not."""
    results = record.results
    drawn = []
    if plots:
        from befit.report.run_plots import plots_of  # matplotlib takes half as long to import as torch

        drawn = plots_of(record)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            name=plain(str(results.get("name") or results["method"])),
            method=run_title(results["method"]),
            sentences=headline_sentences(results),
            figures=_figures(results),
            above=sections_above(record),
            # the SVG comes from an XML serialiser, which escapes the names inside
            plots=[(plot.title, Markup(plot.svg), plot.note, plot.wide) for plot in drawn],
            undrawn=not plots,
            below=sections_below(record),
            facts=facts(results),
            environment=environment_table(record.environment),
            config="\n".join(map(plain, record.config.splitlines())),
        )
    )


def small_page(title: str, *parts: str) -> str:
    """A page in the report's style: a title, which is escaped, and parts that are HTML already."""
    style = files("befit.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    title = escape(plain(title))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"</head><body><main><h1>{title}</h1>{''.join(parts)}</main></body></html>\n"
    )


@cache
def environment() -> Environment:
    """The template engine of all pages: escapes everything, and writes tables and sections."""
    engine = Environment(
        loader=PackageLoader("befit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.globals |= {"table": _table, "section": _section}
    return engine


def _table(table: Table, titled: bool = True, level: int = 2) -> Markup:
    """A table below its title and above its note; what is a detail can be folded. Nothing without rows."""
    if not table:
        return Markup("")
    body = Markup(html(table)) + _paragraphs(table.note)
    if not titled:
        return body
    if table.detail:
        return Markup("<details><summary>{}</summary>\n{}</details>\n").format(plain(table.title), body)
    return Markup("<h{}>{}</h{}>\n{}").format(level, plain(table.title), level, body)


def _section(section: Section) -> Markup:
    first, *others = section.filled_tables
    heading = Markup("<h2>{}</h2>\n{}").format(section.title, _paragraphs(section.text))
    tables = [_table(first, titled=False), *(_table(table, level=3) for table in others)]
    return heading + Markup("").join(tables) + _paragraphs(section.closing)


def _paragraphs(text: str) -> Markup:
    paragraphs = (plain(paragraph) for paragraph in text.split("\n\n") if paragraph)
    return Markup("").join(Markup('<p class="note">{}</p>\n').format(paragraph) for paragraph in paragraphs)


def _figures(results: RunResults) -> list[tuple[str, str]]:
    """The few numbers at the top, as (number, what it is)."""
    metric, summary, clients = results["metric"], results["summary"], len(results["clients"])
    name = metric.replace("_", " ")
    scored = sum(score_of(row, metric) is not None for row in results["clients"].values())
    mean = f"mean {name}" if clients > 1 else name
    if scored < clients:
        mean += f", {scored} of {count_text(clients, 'client')}"
    figures = [(score_text(score_of(summary, "mean"), metric), mean)]
    counts = [row.get("examples") or 0 for row in results["clients"].values()]
    if clients > 1 and min(counts) < FEW and (weighted := score_of(summary, "weighted_mean")) is not None:
        figures.append((score_text(weighted, metric), BY_EXAMPLES))
    if clients > 1 and score_of(summary, "std") is not None:
        figures.append((gain_text(score_of(summary, "std"), metric, signed=False), "std over clients"))
    if clients > 1 and (worst := summary.get("worst")):
        figures.append((score_text(worst["value"], metric), f"worst: {plain(worst['client'])}"))
    figures.append((str(clients), "client" if clients == 1 else "clients"))
    return figures + [(bytes_text(score_of(summary, f"bytes_{way}")), f"{way}, all clients") for way in ("up", "down")]
