"""`befit plan`: a pilot that says whether federating is likely to pay. Knows no method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    Overrides,
    Quiet,
    print_json,
    remember_config,
    screen,
    show_table,
    show_written,
    training,
)
from befit.report.table import Cell, Table, decimals, difference, score
from befit.runs.progress import Progress


def plan(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", callback=remember_config, help="Configuration in YAML; its data, model and training."
        ),
    ],
    overrides: Overrides = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="About how long it may take; sets rounds and folds. Default: 5."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", metavar="N", help="This many rounds, up to those of the run, however long they take."),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            "--folds",
            metavar="K",
            help="Repeat it with other examples held out, so often. Default: up to 5, as far as data allow.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for plan.json. Default: runs/NAME-plan.")
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try a few rounds on validation examples: does federating pay, where, with what, and how sure is that?

    Trains alone, one model for all, and two personalised methods. "Cannot tell" is an answer.
    """
    with training(as_json, quiet, lambda: "the same command continues where it stopped") as console:
        from befit.config.load import load_experiment
        from befit.studies.pilot import pilot

        experiment = load_experiment(config, overrides or (), imports or ())
        folder = out or Path("runs") / f"{experiment.name}-plan"
        with Progress(console, title=f"{experiment.name}: a pilot", quiet=quiet) as progress:
            result = pilot(experiment, folder, minutes=minutes, rounds=rounds, folds=folds, observer=progress)
    if as_json:
        print_json({"path": str(folder), **result})
    else:
        _show(result, folder)


def _show(result: dict[str, Any], folder: Path) -> None:
    from befit.protocol.registry import ALONE
    from befit.report.comparison import run_title

    console, metric = screen(), result["metric"]

    def gain(row: dict[str, Any]) -> list[Cell]:
        half = (row["high"] - row["low"]) / 2
        return [Cell(row["gain"], difference(metric), half), Cell(row["probability"], decimals(2))]

    sites = [
        [client, row["train"], row["held_out"], Cell(row["alone"], score(metric)), *gain(row), row["answer"]]
        for client, row in result["sites"].items()
    ]
    methods = [
        [run_title(ALONE), Cell(result["alone"], score(metric)), "", "", ""],
        *(
            [run_title(label), Cell(row["score"], score(metric)), *gain(row), row["answer"]]
            for label, row in result["methods"].items()
        ),
    ]
    title = f"Sites, {run_title(result['proposed'])} against training alone"
    headers = ["site", "train", "held out", "alone", "gain ± 95%", "P(gain)", "federating"]
    console.print()
    show_table(console, Table(title, headers, sites), 40)
    console.print()
    head = ["method", metric.replace("_", " "), "gain ± 95%", "P(gain)", "federating"]
    show_table(console, Table("All sites together", head, methods))
    console.print(
        f"{head[1].capitalize()} is the plain mean over sites. In the gain, a site with few examples counts for "
        "little, so it can differ from the difference of two means."
    )
    console.print()
    for sentence in result["sentences"]:
        console.print(sentence, markup=False)
    show_written([("the plan", folder / "plan.json"), ("the pilot's report", folder / "pilot" / "report.html")])
