"""`befit partition`: the records of every client, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from befit.cli.output import (
    Imports,
    Json,
    each_once,
    load_imports,
    messages,
    only_json,
    print_json,
    say,
    screen,
    show_table,
    warnings_to,
)
from befit.core.errors import ConfigError
from befit.report.table import Table

if TYPE_CHECKING:
    from befit.data.federation import Federation
    from befit.data.record_counts import ClientCounts, RecordCounts

SHOWN_CLIENTS = 40
SHOWN_NAMES = 10
PICTURES = (".html", ".png")


def partition(
    source: Annotated[str, typer.Argument(metavar="CONFIG|BENCHMARK", help="Configuration in YAML, or a benchmark.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the configuration, or arguments such as alpha=0.1.",
            callback=each_once,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write a heat map of labels by client, .html or .png.")
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Show how many records of each label every client holds. Trains nothing and reads no model."""
    if out is not None and out.suffix not in PICTURES:
        raise ConfigError([f"--out: must end in {' or '.join(PICTURES)}, got {out}"], "the command")
    with only_json(as_json), warnings_to(messages()):
        from befit.data.record_counts import count_records

        load_imports(imports)
        seen = count_records(federation_of(source, overrides or []))
        if out is not None:
            write(out, seen)
    if as_json:
        print_json(seen.as_dict())
        return
    show(seen)
    if out is not None:
        say(f"heat map: {out}")


def federation_of(source: str, overrides: list[str]) -> Federation:
    """The federation of a configuration, or of a benchmark with arguments."""
    if Path(source).suffix in (".yaml", ".yml") or Path(source).is_file():
        from befit.config.load import load_experiment
        from befit.runs.loading import load_federation

        return load_federation(load_experiment(Path(source), overrides))
    from befit.config.overrides import apply_overrides
    from befit.data.registry import build, get

    get(source)  # an unknown name is reported before its arguments
    values: dict[str, object] = {}
    if problems := apply_overrides(values, overrides):
        raise ConfigError(problems, "the command")
    return build(source, None, values)


def write(out: Path, seen: RecordCounts) -> None:
    from befit.core.storage import atomic_write
    from befit.report.partition_map import partition_page, partition_png

    atomic_write(out, partition_png(seen) if out.suffix == ".png" else partition_page(seen).encode())


def show(seen: RecordCounts) -> None:
    console, rule = screen(), seen.partition
    sizes = f"{len(seen.clients)} clients, {len(seen.newcomers)} newcomers"
    say(f"{seen.federation} {seen.version}: {sizes}, {seen.task}")
    if rule:
        digest = str(rule.get("sha256"))[:16]
        say(f"divided by {rule.get('name')}, seed {rule.get('seed')}, SHA-256 {digest}…", "dim")
    for title, holdings in (("Clients", seen.clients), ("Newcomers", seen.newcomers)):
        if holdings:
            console.print()
            show_table(console, Table(title, headers(seen), rows(seen, holdings)))
        if len(holdings) > SHOWN_CLIENTS:
            console.print(f"… and {len(holdings) - SHOWN_CLIENTS} more; --json has all", style="dim")
    if seen.kind != "records":
        console.print()
        say(
            f"Columns after test count the training data by {seen.kind}; largest is the share of a client's most "
            f"frequent {seen.kind}.",
            "dim",
        )


def headers(seen: RecordCounts) -> list[str]:
    sizes, few = ["client", "train", "val", "test"], len(seen.names) <= SHOWN_NAMES
    if seen.kind == "records":
        return sizes
    return [*sizes, "largest", *(seen.names if few else (f"{seen.kind}s",))]


def rows(seen: RecordCounts, holdings: tuple[ClientCounts, ...]) -> list[list[str]]:
    lines = []
    for client in holdings[:SHOWN_CLIENTS]:
        counts = client.counts["train"]
        if len(seen.names) <= SHOWN_NAMES:
            numbers = [str(counts.get(name, 0)) for name in seen.names]
        else:
            numbers = [str(len(counts))]
        share = client.largest_share("train")
        sizes = [client.client, *(str(client.sizes[split]) for split in ("train", "val", "test"))]
        kinds = [] if seen.kind == "records" else ["-" if share is None else f"{share:.0%}", *numbers]
        lines.append([*sizes, *kinds])
    return lines
