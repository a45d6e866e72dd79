"""`befit ablate`: train once, merge many times, and say what changed. Knows no ablation by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    Quiet,
    Trial,
    each_once,
    print_json,
    remember_config,
    screen,
    show_table,
    show_written,
    training,
)
from befit.core.errors import ConfigError
from befit.report.table import Table
from befit.runs.progress import Progress

if TYPE_CHECKING:
    from befit.studies.ablations.base import AblationEntry
    from befit.studies.ablations.measure import FinishedAblation

OPTION = "ablation."  # prefix of an option of the ablation; other keys change the configuration


def ablate(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Without it, list all ablations.")] = None,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG|STUDY",
            callback=remember_config,
            help="Configuration or study in YAML; a study's first run of the method. Without it, explain NAME.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Changes to it, and options such as ablation.step=0.05.", callback=each_once
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder for all ablations of a configuration. Default: runs/…-ablations."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,...", help="Seeds to repeat for, such as 0,1,2 or 0-9.")
    ] = None,
    trial: Trial = False,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ablations: train a method's branches once, merge them in many ways, and compare.

    A study stands for its first run of the method, with the study's seeds; KEY=VALUE changes that run.

    Runs stay in DIR/runs, and what they share in DIR/shared, so that further ablations with the same configuration
    train nothing. A grid of options is also left as a study, DIR/NAME/study.yaml: befit compare STUDY --out DIR.
    """
    if name is None:
        _list(as_json)
        return
    from befit.config.overrides import apply_overrides, parse_seeds
    from befit.studies.ablations import base

    if config is None:
        _describe(base.get(name), as_json)
        return
    base.get(name)
    changes = [override for override in overrides or () if not override.startswith(OPTION)]
    own = [override.removeprefix(OPTION) for override in overrides or () if override.startswith(OPTION)]
    options: dict[str, Any] = {}
    if problems := apply_overrides(options, own):
        raise ConfigError([OPTION + problem for problem in problems], "the command")
    wanted = parse_seeds(seeds)
    if trial and wanted is not None:
        raise ConfigError(["--seeds: a trial runs one seed"], "the command")
    with training(as_json, quiet, lambda: "the same command continues where the training stopped") as console:
        from befit.studies.ablations.measure import ablate as measure
        from befit.studies.ablations.measure import choose

        chosen = choose(name, config, changes, imports or (), trial=trial)
        with Progress(console, title=f"{chosen.experiment.name}: {name}", quiet=quiet) as progress:
            done = measure(name, chosen, options=options, seeds=wanted, out=out, observer=progress)
    if as_json:
        print_json({"path": str(done.path), "results": done.results})
    else:
        _show(done)


def _list(as_json: bool) -> None:
    """All ablations, one line each."""
    from befit.studies.ablations import base

    entries = [base.get(name) for name in base.names()]
    if as_json:
        print_json([_plain(entry) for entry in entries])
        return
    rows = [[entry.name, entry.summary] for entry in entries]
    show_table(screen(), Table("", ["ablation", "what it shows"], rows), wrap=1)
    screen().print(
        "\nbefit ablate NAME explains one; befit ablate NAME CONFIG|STUDY [KEY=VALUE ...] measures.", markup=False
    )


def _describe(entry: AblationEntry, as_json: bool) -> None:
    if as_json:
        print_json(_plain(entry))
        return
    console = screen()
    options = {p.name: p for p in entry.parameters}
    console.print(f"{entry.name}, of the method {entry.method}", style="bold", markup=False)
    for paragraph in entry.docstring.split("\n\n"):
        if paragraph.split()[0] not in options:  # those are in the table
            console.print()
            console.print(" ".join(paragraph.split()), markup=False)
    if options:
        from befit.core.schema import plain, show

        rows = [[OPTION + name, p.description, show(plain(p.default))] for name, p in options.items()]
        console.print()
        show_table(console, Table("", ["option", "what it is", "default"], rows), wrap=1)


def _plain(entry: AblationEntry) -> dict[str, Any]:
    from befit.core.schema import plain, type_words

    options = {
        p.name: {"default": plain(p.default), "type": type_words(p.type), "description": p.description}
        for p in entry.parameters
    }
    return {
        "name": entry.name,
        "title": entry.title,
        "method": entry.method,
        "summary": entry.summary,
        "options": options,
    }


def _show(done: FinishedAblation) -> None:
    console = screen()
    for table in done.findings.tables:
        if not table.detail:
            console.print()
            show_table(console, table)
    console.print()
    for sentence in done.findings.sentences:
        console.print(sentence, markup=False)
    files = {"page with plots": "html", "as text": "md", "every measurement": "csv", "all of it": "json"}
    show_written([(what, done.path / f"ablation.{suffix}") for what, suffix in files.items()])
