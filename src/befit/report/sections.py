"""What report.md and report.html show, section by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from befit.core.text import dotted
from befit.report import tables
from befit.report.groups import GROUP_NOTE, group_tables
from befit.report.newcomers import NEWCOMER_NOTE, newcomer_sentences, newcomer_summary_table, newcomer_table
from befit.report.numbers import count_text, plain
from befit.report.record import RunRecord, export_note, written_files
from befit.report.results import RunResults, newcomers_of
from befit.report.table import BYTES, Cell, Table
from befit.report.words import (
    COMMUNICATION_NOTE,
    COST_NOTE,
    GROUPS_SHOWN,
    OVER_TIME_NOTE,
    client_notes,
    failure_note,
    group_title,
    outbound_note,
)

_NUMBERS = ("int", "float", "str", "bool", "list")  # types of single values; their encoded length varies
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A heading, sentences, and tables: the first stands below the heading without a title of its own."""

    title: str
    tables: Sequence[Table]
    text: str = ""
    closing: str = ""

    @property
    def filled_tables(self) -> list[Table]:
        return [table for table in self.tables if table]


def sections_above(record: RunRecord) -> list[Section]:
    """What stands before the plots: failures, who gained, and every client."""
    results = record.results
    clients = replace(tables.client_table(results), note="\n\n".join(client_notes(results)))
    details = [
        *(table(results) for table in (tables.metrics_table, tables.confusion_table, tables.curve_table)),
        *(tables.diagnostics_table(results), *tables.pair_tables(results)),
    ]
    sections = [
        Section("Failures", [tables.failure_table(results)], failure_note(results)),
        Section("Summary", [tables.summary_table(results)]),
        Section("Clients", [clients, *_groups(results), *details]),
    ]
    return [section for section in sections if section.filled_tables]


def sections_below(record: RunRecord) -> list[Section]:
    """What stands after the plots: other clients' examples, newcomers, what was sent, what it cost, and the files."""
    results, method = record.results, record.results["method"]
    over_time = replace(tables.over_time_table(results), note=OVER_TIME_NOTE)
    costs = replace(tables.cost_table(results), note=COST_NOTE)
    sent = replace(tables.communication_table(results), note=COMMUNICATION_NOTE)
    details = tables.client_communication_table(results), tables.stage_table(record.ledger, method)
    files = Table("Files", ["what", "where, in the run directory"], written_files(record))
    missing = ", ".join(record.missing)
    closing = [export_note(record), f"Not in this directory, and so not in this report: {missing}." * bool(missing)]
    sections = [
        Section(over_time.title, [over_time]),
        _newcomers(results),
        Section("Communication", [sent, *details]),
        Section(costs.title, [costs]),
        _outbound(record),
        Section("Files", [files], closing="\n\n".join(filter(None, closing))),
    ]
    return [section for section in sections if section.filled_tables]


def _groups(results: RunResults, who: str = "clients") -> list[Table]:
    """Of several groups of one kind, the last says what their scores are."""
    groups = group_tables(results, who)
    return [*groups[:-1], *(replace(table, note=f"{table.note}\n\n{GROUP_NOTE}") for table in groups[-1:])]


def _newcomers(results: RunResults) -> Section:
    view = newcomers_of(results)
    single = replace(newcomer_table(results), title="One by one", note=NEWCOMER_NOTE)
    groups = _groups(view, "newcomers") if view else []
    text = " ".join(newcomer_sentences(results))
    return Section("Newcomers", [newcomer_summary_table(results), single, *groups] if view else [], text)


def _outbound(record: RunRecord) -> Section:
    groups = outbound_groups(record.outbound)
    details = []
    for group in groups[:GROUPS_SHOWN]:
        names = ", ".join(group.clients) if len(group.clients) > 5 else ""
        details.append(replace(group.table, title=f"Everything that left {group_title(group.clients)}", note=names))
    closing = ""
    if hidden := groups[GROUPS_SHOWN:]:
        count = sum(len(group.clients) for group in hidden)
        closing = f"{count_text(len(hidden), 'further list')} of {count} clients: see outbound.json."
    totals = [outbound_totals(record.outbound), *details] if record.outbound else []
    return Section("What left each client", totals, outbound_note(record), closing)


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Versions and machine, as rows of dotted name and value, as a detail."""
    rows = [[name, str(value)] for name, value in dotted(environment).items()]
    return Table("Versions and machine", ["what", "value"], rows, detail=True)


@dataclass(frozen=True)
class OutboundGroup:
    """Clients that sent the same names, shapes and types equally often, with a table of these."""

    clients: tuple[str, ...]
    table: Table


def outbound_totals(outbound: Mapping[str, Sequence[Entry]]) -> Table:
    """By stage: how many arrays and single values left how many clients, and their bytes over all clients.

    Single values are counted with the longest encoding that occurred, so that their bytes are an upper bound.
    """
    stages: dict[str, dict[str, Any]] = {}
    for client, entries in outbound.items():
        for entry in entries:
            stage = stages.setdefault(entry["stage"], {"clients": set(), "arrays": set(), "values": set(), "bytes": 0})
            stage["clients"].add(client)
            stage["values" if _is_value(entry) else "arrays"].add(entry["name"])
            stage["bytes"] += entry["bytes"] * entry["count"]
    rows = [
        [name, *(len(stage[key]) for key in ("clients", "arrays", "values")), Cell(stage["bytes"], BYTES)]
        for name, stage in stages.items()
    ]
    headers = ["stage", "clients", "different arrays", "different values", "total, all clients"]
    return Table("What left the clients, by stage", headers, rows)


def outbound_groups(outbound: Mapping[str, Sequence[Entry]]) -> list[OutboundGroup]:
    """The full list, once for all clients that share it; the largest group first."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for client, entries in outbound.items():
        groups.setdefault(tuple(map(_identity, entries)), []).append(client)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [OutboundGroup(tuple(map(plain, clients)), _table([outbound[c] for c in clients])) for clients in ordered]


def _identity(entry: Entry) -> tuple[Any, ...]:
    size = None if _is_value(entry) else entry["bytes"]
    return entry["stage"], entry["name"], tuple(entry["shape"]), entry["dtype"], entry["count"], size


def _table(lists: Sequence[Sequence[Entry]]) -> Table:
    rows = []
    for same in zip(*lists, strict=True):  # the same entry from every client of the group
        entry = same[0]
        least, most = (bound(client_entry["bytes"] for client_entry in same) for bound in (min, max))
        shape = " \N{MULTIPLICATION SIGN} ".join(map(str, entry["shape"])) or (
            "one value" if _is_value(entry) else "scalar"
        )
        size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        rows.append([entry["stage"], entry["name"], shape, entry["dtype"], size, f"{entry['count']:,}"])
    headers = ["stage", "name", "shape", "type", "bytes each time", "times"]
    return Table("Everything that left", headers, rows, detail=True)


def _is_value(entry: Entry) -> bool:
    return not entry["shape"] and entry["dtype"] in _NUMBERS
