"""`befit select`: which clients gain from the larger of two models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    Overrides,
    Quiet,
    names_in,
    print_json,
    remember_config,
    say,
    screen,
    show_table,
    training,
)
from befit.report.table import Table
from befit.runs.progress import Progress


def select(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", callback=remember_config, help="Configuration in YAML with one or two models."
        ),
    ],
    overrides: Overrides = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Default: the two models of CONFIG.")
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="POINTS", help="Gain that justifies the larger model.")
    ] = 2.0,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,...", help="Average gains over these seeds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the runs. Default: runs/NAME-select.")
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train every client alone with two models, and give the larger to those who gain more than a threshold.

    Prints what each client gains, and the families for a configuration. The same command again continues where it
    stopped.
    """
    with training(as_json, quiet, lambda: "the same command continues where it stopped") as console:
        from befit.config.load import load_experiment
        from befit.config.overrides import parse_seeds
        from befit.studies.select import choose_models

        wanted = parse_seeds(seeds)
        experiment = load_experiment(config, overrides or (), imports or ())
        folder = out or Path("runs") / f"{experiment.name}-select"
        names = [
            name if seed is None else f"{name}, seed {seed}" for name in ("small", "large") for seed in wanted or [None]
        ]
        with Progress(console, names, title=f"{experiment.name}: two models", quiet=quiet) as progress:
            choice = choose_models(
                experiment, models=names_in(models), threshold=threshold, seeds=wanted, out=folder, observer=progress
            )
    if as_json:
        print_json(choice)
        return
    show(choice)
    say(f"\nthe runs: {folder}")


def show(choice: dict[str, Any]) -> None:
    from befit.core.yamlfile import write_yaml

    console = screen()
    seeds = choice["seeds"] if len(choice["seeds"]) > 1 else []
    rows = [
        (
            client,
            f"{row['small']:.1f}",
            f"{row['large']:.1f}",
            f"{row['gain']:+.1f}",
            *(f"{gain:+.1f}" for gain in row["gains"] if seeds),
            row["model"],
        )
        for client, row in choice["clients"].items()
    ]
    names = choice["models"]
    say(f"small: {names['small']}, large: {names['large']}; {choice['metric'].replace('_', ' ')} in points")
    if choice["limit"]:
        say(choice["limit"], "yellow")
    say(f"the larger one where it gains more than {choice['threshold']:g} points\n")
    headers = ["client", "small", "large", "gain", *(f"seed {seed}" for seed in seeds), "model"]
    show_table(console, Table("", headers, rows))
    few = choice["families"]["small"]["clients"]
    if few and len(few) < len(rows):
        console.print("\nAs a configuration takes it:", style="bold")
        blocks = {"model": {"id": names["large"]}, "families": choice["families"]}
        say(write_yaml(blocks).rstrip())
    else:
        console.print(f"\nAll clients get the {'small' if few else 'large'} one.")
