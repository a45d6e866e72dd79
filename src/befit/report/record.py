"""Reads what a run left in its directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from befit.core.errors import RunError
from befit.core.storage import read_bytes, read_json, read_lines, read_sealed
from befit.report.numbers import count_text, plain
from befit.report.results import ClientRow, RunResults, baseline_labels, newcomers_of
from befit.report.structure import Structure, read_structures


@dataclass(frozen=True)
class RunRecord:
    """The files of one run as plain data. `missing` names those that are not there; their fields are empty.

    structures  per client of the method, where its adapter's ranks are, if they differ between modules
    scores  per run (the method's name, or a baseline's label) the "score" lines of its metrics.jsonl
    """

    path: Path
    results: RunResults
    metrics: list[dict[str, Any]] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    outbound: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    missing: tuple[str, ...] = ()
    scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    structures: dict[str, Structure] = field(default_factory=dict)


def read_record(path: Path) -> RunRecord:
    """Raises RunError where results.json is missing or is no run's, or where any file cannot be read."""
    if (path / "compare.html").is_file():
        raise RunError(f"{path} holds a comparison: open {path / 'compare.html'}, or name one of {path / 'runs'}")
    if not (path / "results.json").is_file():
        raise RunError(
            f"{path} has no results.json; the report is written from a finished run (befit run ... --resume)"
        )
    results = cast(RunResults, read_sealed(path / "results.json"))
    if lacking := [key for key in ("method", "metric", "clients", "summary") if key not in results]:
        raise RunError(f"{path / 'results.json'} is not the result of a run: it has no {', '.join(lacking)}")
    missing = tuple(
        name
        for name in ("metrics.jsonl", "ledger.jsonl", "outbound.json", "config.yaml", "env.json")
        if not (path / name).is_file()
    )
    scores = {results["method"]: _scores(path / "metrics.jsonl")}
    for label in baseline_labels(results):
        scores.setdefault(label, _scores(path / "baselines" / label / "metrics.jsonl"))
    return RunRecord(
        path=path,
        results=results,
        metrics=read_lines(path / "metrics.jsonl"),
        ledger=read_lines(path / "ledger.jsonl"),
        outbound={} if "outbound.json" in missing else read_json(path / "outbound.json"),
        environment={} if "env.json" in missing else read_json(path / "env.json"),
        config="" if "config.yaml" in missing else read_bytes(path / "config.yaml").decode(errors="replace"),
        missing=missing,
        scores=scores,
        structures=read_structures(path / "clients", list(results["clients"])),
    )


def written_files(record: RunRecord) -> list[tuple[str, str]]:
    """What a reader may want to open, as (what, path inside the run directory)."""
    named = (
        ("this report", "report.html"),
        ("this report as text", "report.md"),
        ("all numbers", "results.json"),
        ("scores, losses and diagnostics by round", "metrics.jsonl"),
        ("bytes and time of every exchange", "ledger.jsonl"),
        ("everything that left each client", "outbound.json"),
        ("the resolved configuration", "config.yaml"),
        ("versions and machine", "env.json"),
    )
    rows = [(what, name) for what, name in named if name.startswith("report.") or (record.path / name).is_file()]
    adapters = adapters_of(record.results["clients"])
    if adapters:
        leaf = plain(adapters[0]).rpartition("/")[2]
        folder = plain(adapters[0]) if len(adapters) == 1 else f"clients/<client>/{leaf}"
        kind = "PEFT checkpoints" if leaf == "adapter" else "transformers directories"
        rows.append((f"{leaf}{'s' * (len(adapters) > 1)} of {len(adapters)} ({kind})", folder))
    newcomers = newcomers_of(record.results)
    if arrived := adapters_of(newcomers["clients"] if newcomers else {}):
        leaf = plain(arrived[0]).rpartition("/")[2]
        rows.append((f"{leaf}s of {count_text(len(arrived), 'newcomer')}", f"newcomers/<newcomer>/{leaf}"))
    rows += [
        (f"the same for the baseline {label}", f"baselines/{label}")
        for label in baseline_labels(record.results)
        if (record.path / "baselines" / label).is_dir()
    ]
    return rows


def adapters_of(clients: Mapping[str, ClientRow]) -> list[str]:
    """The folders of those that have one."""
    return [folder for row in clients.values() if (folder := row.get("adapter"))]


def export_note(record: RunRecord) -> str:
    """Which clients have no adapter, and what the adapters lack where the model that was scored has a gate as well."""
    rows = record.results["clients"].values()
    folders = adapters_of(record.results["clients"])
    lacking = sum(row.get("adapter", "") is None for row in rows)
    notes = []
    if lacking:
        notes.append(f"{count_text(lacking, 'client')} of {len(rows)} {'has' if lacking == 1 else 'have'} no adapter.")
    card = record.path / folders[0] / "README.md" if folders else None  # all clients deploy the same slots
    text = read_bytes(card).decode(errors="replace") if card and card.is_file() else ""
    if match := re.search(r"this checkpoint is the slot '([^']*)' alone", text):
        notes.append(
            "The scores are of the whole model, which mixes its slots as no PEFT checkpoint can. "
            f"Each is the slot {plain(match[1])!r} alone, and scores "
            "differently; befit predict uses the whole."
        )
    return " ".join(notes)


def _scores(path: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if line["kind"] == "score"]
