"""`befit partition`: who holds what, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from befit.cli.output import Imports, load_imports, messages, only_json, print_json, print_table, screen, warnings_to
from befit.core.errors import ConfigError

if TYPE_CHECKING:
    from befit.data.federation import Federation
    from befit.data.overview import Holding, Overview

SHOWN_CLIENTS = 40
SHOWN_NAMES = 10
PICTURES = (".html", ".png")


def partition(
    source: Annotated[str, typer.Argument(metavar="CONFIG|BENCHMARK", help="Experiment in YAML, or a benchmark.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes: of the experiment, or arguments such as alpha=0.1."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Heat map of labels by client, .html or .png.")
    ] = None,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Show how many records of each label every client holds. Trains nothing and reads no model."""
    if out is not None and out.suffix not in PICTURES:
        raise ConfigError([f"--out: must end in {' or '.join(PICTURES)}, got {out}"], "the command")
    with only_json(as_json), warnings_to(messages()):
        from befit.data.overview import overview

        load_imports(imports)
        seen = overview(federation_of(source, overrides or []))
        if out is not None:
            write(out, seen)
    if as_json:
        print_json(seen.as_dict())
        return
    show(seen)
    if out is not None:
        screen().print(f"heat map: {out}", markup=False, soft_wrap=True)


def federation_of(source: str, overrides: list[str]) -> Federation:
    """The federation of a configuration, or of a benchmark with arguments."""
    if Path(source).suffix in (".yaml", ".yml") or Path(source).is_file():
        from befit.config.experiment import load_experiment
        from befit.runs.loading import load_federation

        return load_federation(load_experiment(Path(source), overrides))
    from befit.config.overrides import apply_overrides
    from befit.data.registry import build, get

    get(source)  # a name that is none is told before its arguments
    values: dict[str, object] = {}
    if problems := apply_overrides(values, overrides):
        raise ConfigError(problems, "the command")
    return build(source, None, values)


def write(out: Path, seen: Overview) -> None:
    from befit.core.storage import atomic_write
    from befit.report.partition_map import partition_page, partition_png

    atomic_write(out, partition_png(seen) if out.suffix == ".png" else partition_page(seen).encode())


def show(seen: Overview) -> None:
    console = screen()
    rule = seen.partition
    console.print(
        f"{seen.federation} {seen.version}: {len(seen.clients)} clients, {len(seen.newcomers)} newcomers, {seen.task}",
        markup=False,
        soft_wrap=True,
    )
    if rule:
        digest = str(rule.get("sha256"))[:16]
        console.print(
            f"divided by {rule.get('name')}, seed {rule.get('seed')}, SHA-256 {digest}…",
            markup=False,
            soft_wrap=True,
            style="dim",
        )
    for title, holdings in (("Clients", seen.clients), ("Newcomers", seen.newcomers)):
        if holdings:
            console.print()
            print_table(console, headers(seen), rows(seen, holdings), title=title)
        if len(holdings) > SHOWN_CLIENTS:
            console.print(f"… and {len(holdings) - SHOWN_CLIENTS} more; --json has all", style="dim")
    console.print()
    what = f"the training data by {seen.kind}" if seen.kind != "records" else "all records"
    console.print(
        f"Columns after test count {what}; largest is the share of what a client has most of.",
        style="dim",
        soft_wrap=True,
    )


def headers(seen: Overview) -> list[str]:
    few = len(seen.names) <= SHOWN_NAMES
    return ["client", "train", "val", "test", "largest", *(seen.names if few else (f"{seen.kind}s",))]


def rows(seen: Overview, holdings: tuple[Holding, ...]) -> list[list[str]]:
    made = []
    for one in holdings[:SHOWN_CLIENTS]:
        counts = one.counts["train"]
        if len(seen.names) <= SHOWN_NAMES:
            held = [str(counts.get(name, 0)) for name in seen.names]
        else:
            held = [str(len(counts))]
        share = one.largest_share("train")
        made.append(
            [
                one.client,
                *(str(one.sizes[split]) for split in ("train", "val", "test")),
                "-" if share is None else f"{share:.0%}",
                *held,
            ]
        )
    return made
