"""report.html: one file with everything inside, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from befit.report import tables
from befit.report.comparison import baseline_labels, compared_with, gain_over, run_title
from befit.report.groups import GROUP_NOTE, group_tables
from befit.report.headline import headline_sentences
from befit.report.markdown import flat
from befit.report.newcomers import (
    NEWCOMER_NOTE,
    newcomer_sentences,
    newcomer_summary_table,
    newcomer_table,
    newcomers_of,
)
from befit.report.numbers import bytes_text, count_text, counts_examples, gain_text, plain, score_of, score_text
from befit.report.outbound import outbound_groups, outbound_totals
from befit.report.plots import Plot, plots_of
from befit.report.record import RunRecord, export_note, written_files
from befit.report.table import Table, html
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

__all__ = ["environment", "render_page"]


def render_page(record: RunRecord, plots: bool = True) -> str:
    """The whole page. Everything that comes from the run is escaped by the template engine; only the SVG is not."""
    results = record.results
    groups = outbound_groups(record.outbound)
    hidden = groups[GROUPS_SHOWN:]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            name=plain(str(results.get("name") or results["method"])),
            method=run_title(results["method"]),
            sentences=headline_sentences(results),
            figures=_figures(results),
            facts=facts(results),
            summary=tables.summary_table(results),
            clients=tables.client_table(results),
            marks=_marks(results),
            client_notes=client_notes(results),
            newcomer_sentences=newcomer_sentences(results),
            newcomer_summary=newcomer_summary_table(results),
            newcomers=newcomer_table(results),
            newcomer_marks=_marks(newcomers_of(results) or results),
            groups_of_clients=group_tables(results),
            groups_of_newcomers=group_tables(newcomers_of(results), "newcomers") if "newcomers" in results else [],
            group_note=GROUP_NOTE,
            newcomer_note=NEWCOMER_NOTE,
            plots=[_drawn(plot) for plot in plots_of(record)] if plots else [],
            undrawn=not plots,
            failures=tables.failure_table(results),
            failure_note=failure_note(results),
            over_time=tables.over_time_table(results),
            over_time_note=OVER_TIME_NOTE,
            communication=tables.communication_table(results),
            communication_note=COMMUNICATION_NOTE,
            costs=tables.cost_table(results),
            cost_note=COST_NOTE,
            per_client=tables.client_communication_table(results),
            stages=tables.stage_table(record.ledger),
            curve=tables.curve_table(results),
            diagnostics=tables.diagnostics_table(results),
            outbound=outbound_totals(record.outbound),
            outbound_note=outbound_note(record),
            groups=[(group_title(group.clients), group.clients, group.table) for group in groups[:GROUPS_SHOWN]],
            hidden=f"{count_text(len(hidden), 'further list')} of {sum(len(group.clients) for group in hidden)} clients"
            if hidden
            else "",
            environment=flat(record.environment),
            config="\n".join(map(plain, record.config.splitlines())),
            files=written_files(record),
            export_note=export_note(record),
            missing=", ".join(record.missing),
        )
    )


@cache
def environment() -> Environment:
    """The template engine of all pages: escapes everything, and knows how tables are aligned."""
    made = Environment(
        loader=PackageLoader("befit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["is_numeric"] = tables.is_numeric
    made.globals["section"] = section
    return made


def section(one: Table) -> Markup:
    """A table below its title and above its note; what is a detail can be folded."""
    note = Markup("").join(Markup('<p class="note">{}</p>\n').format(paragraph) for paragraph in one.paragraphs)
    frame = "<details><summary>{}</summary>\n{}{}</details>\n" if one.detail else "<h2>{}</h2>\n{}{}\n"
    return Markup(frame).format(plain(one.title), Markup(html(one)), note)


def _drawn(plot: Plot) -> dict[str, Any]:
    # the SVG comes from an XML serialiser, which escapes the names inside
    return {"title": plot.title, "svg": Markup(plot.svg), "note": plot.note, "wide": plot.wide}


def _marks(results: Mapping[str, Any]) -> list[Any]:
    """The header of the gains that are coloured, and per client whether it is clear; empty where none is judged."""
    compared = compared_with(baseline_labels(results))
    if not compared or not counts_examples(results["metric"]):
        return []
    gains = [gain_over(results, row, compared[-1]) for row in results["clients"].values()]
    return [tables.gain_header(compared[-1]), ["" if gain is None else gain.verdict for gain in gains]]


def _figures(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The few numbers at the top, as (number, what it is)."""
    metric, summary = results["metric"], results["summary"]
    name = metric.replace("_", " ")
    scored = sum(score_of(row, metric) is not None for row in results["clients"].values())
    mean = f"mean {name}" if len(results["clients"]) > 1 else name
    if scored < len(results["clients"]):
        mean += f", {scored} of {count_text(len(results['clients']), 'client')}"
    figures = [(score_text(score_of(summary, "mean"), metric), mean)]
    if score_of(summary, "std") is not None and len(results["clients"]) > 1:
        figures.append((gain_text(score_of(summary, "std"), metric, signed=False), "std over clients"))
    if summary.get("worst") and len(results["clients"]) > 1:
        figures.append(
            (score_text(score_of(summary["worst"], "value"), metric), f"worst: {plain(summary['worst']['client'])}")
        )
    figures.append((str(len(results["clients"])), "client" if len(results["clients"]) == 1 else "clients"))
    sent = [score_of(summary, key) for key in ("bytes_up", "bytes_down")]
    figures += [(bytes_text(total), f"{way}, all clients") for total, way in zip(sent, ("up", "down"), strict=True)]
    return figures
