"""`befit adapt`: how soon newcomers learn their task from different starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import Json, Quiet, names_in, print_json, say, screen, show_table, training
from befit.core.errors import ConfigError
from befit.core.storage import check_folder
from befit.runs.progress import Progress

if TYPE_CHECKING:
    from befit.studies.adapt import Adapted


def adapt(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN… [KEY=VALUE]…", help="Finished runs, and changes to them."),
    ],
    starts: Annotated[
        str, typer.Option("--starts", metavar="NAME,NAME,…", help="Starts to compare.")
    ] = "random,mean,server",
    steps: Annotated[int, typer.Option("--steps", help="Steps of training.")] = 200,
    every: Annotated[int, typer.Option("--every", help="Steps between two scores.")] = 25,
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="NAME,NAME,…", help="Methods of the runs. Default: all.")
    ] = None,
    newcomers: Annotated[
        str | None,
        typer.Option("--newcomers", metavar="ID,ID,…", help="Newcomers of the data. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the batches.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write adapt.json, .csv, .html and .png there.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train newcomers for a few steps from several starts, and compare how soon they learn their task.

    random: a fresh adapter. mean: the mean adapter of the clients with the newcomer's backbone. server: the adapter
    that the method gives a newcomer, by its download or a mixture by relevance. Training uses the run's learning rate
    unless train.lr=... sets another.
    """
    paths = [argument for argument in runs if "=" not in argument]
    overrides = [argument for argument in runs if "=" in argument]
    if not paths:
        raise ConfigError(["RUN: name a run directory"], "the command")
    if out is not None:
        check_folder(out)
    with (
        training(as_json, quiet, lambda: "nothing is kept of it") as console,
        Progress(console, title="newcomers adapt", quiet=quiet) as progress,
    ):
        from befit.studies.adapt import adapt as adapt_runs

        results = adapt_runs(
            [Path(path) for path in paths],
            starts=names_in(starts) or [],
            steps=steps,
            every=every,
            seed=seed,
            methods=names_in(methods),
            newcomers=names_in(newcomers),
            overrides=overrides,
            observer=progress,
        )
        document = as_dict(results)
        if out is not None:
            write(out, results, document)
    if as_json:
        print_json(document)
        return
    show(document)
    if out is not None:
        curves = any(row["newcomers"] for row in document["summary"])
        say(f"\ncurves: {out / 'adapt.html'}" if curves else f"\nreasons: {out / 'adapt.json'}")


def as_dict(results: list[Adapted]) -> dict[str, Any]:
    from befit.studies.adapt import summary

    curves = [
        {
            "run": result.run,
            "method": result.method,
            "start": result.start,
            "newcomer": result.newcomer,
            **(
                {"reason": result.reason}
                if result.curve is None
                else {"steps": list(result.curve.steps), "scores": [dict(metrics) for metrics in result.curve.metrics]}
            ),
        }
        for result in results
    ]
    return {
        "metric": results[0].metric,
        "newcomers": len({result.newcomer for result in results}),
        "summary": summary(results),
        "curves": curves,
    }


def write(out: Path, results: list[Adapted], document: dict[str, Any]) -> None:
    from befit.core.storage import atomic_write, write_json
    from befit.studies.adapt_report import adaptation_csv, adaptation_page, adaptation_png

    rows, metric = document["summary"], document["metric"]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "adapt.json", document)
    atomic_write(out / "adapt.csv", adaptation_csv(results).encode())
    atomic_write(out / "adapt.html", adaptation_page(rows, metric, document["newcomers"]).encode())
    atomic_write(out / "adapt.png", adaptation_png(rows, metric))


def show(document: dict[str, Any]) -> None:
    from befit.studies.adapt_report import adaptation_table, missing_starts

    console, metric = screen(), document["metric"]
    show_table(console, adaptation_table(document["summary"], metric))
    for sentence in missing_starts(document["summary"]):
        say(sentence)
