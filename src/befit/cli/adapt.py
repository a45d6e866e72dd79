"""`befit adapt`: how soon newcomers learn their task, by where they start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import messages, only_json, print_json, screen, show_table, warnings_to
from befit.core.errors import ConfigError
from befit.core.storage import check_folder

if TYPE_CHECKING:
    from befit.studies.adapt import Adapted


def adapt(
    runs: Annotated[list[str], typer.Argument(metavar="RUN… [KEY=VALUE]…", help="Finished runs, and changes to them.")],
    starts: Annotated[
        str, typer.Option("--starts", metavar="NAME,NAME,…", help="Of random, mean and server.")
    ] = "random,mean,server",
    steps: Annotated[int, typer.Option("--steps", help="Of training.")] = 200,
    every: Annotated[int, typer.Option("--every", help="Score after every so many of them.")] = 25,
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="NAME,NAME,…", help="Of the runs. Default: all.")
    ] = None,
    newcomers: Annotated[
        str | None, typer.Option("--newcomers", metavar="ID,ID,…", help="Of the data. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the batches.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write adapt.json, .csv, .html and .png there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Train newcomers for a few steps from several starts, and compare how soon they learn their task.

    random: a fresh adapter. mean: of the clients' adapters with the newcomer's backbone. server: what the method has
    for a newcomer, such as its download or a mixture by relevance. The rate is the run's; train.lr=1e-4 sets another.
    """
    paths, overrides = [one for one in runs if "=" not in one], [one for one in runs if "=" in one]
    if not paths:
        raise ConfigError(["RUN: name a run directory"], "the command")
    if out is not None:
        check_folder(out)
    with only_json(as_json), warnings_to(messages()):
        from befit.studies.adapt import adapt as adapt_runs

        found = adapt_runs(
            [Path(one) for one in paths],
            starts=_listed(starts) or [],
            steps=steps,
            every=every,
            seed=seed,
            methods=_listed(methods),
            newcomers=_listed(newcomers),
            overrides=overrides,
        )
        told = as_dict(found)
        if out is not None:
            write(out, found, told)
    if as_json:
        print_json(told)
        return
    show(told)
    if out is not None:
        curves = any(row["newcomers"] for row in told["summary"])
        made = f"curves: {out / 'adapt.html'}" if curves else f"reasons: {out / 'adapt.json'}"
        screen().print(f"\n{made}", markup=False, soft_wrap=True)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [one.strip() for one in text.split(",") if one.strip()]


def as_dict(found: list[Adapted]) -> dict[str, Any]:
    from befit.studies.adapt import summary

    curves = [
        {
            "run": one.run,
            "method": one.method,
            "start": one.start,
            "newcomer": one.newcomer,
            **(
                {"reason": one.reason}
                if one.curve is None
                else {"steps": list(one.curve.steps), "scores": [dict(metrics) for metrics in one.curve.metrics]}
            ),
        }
        for one in found
    ]
    return {
        "metric": found[0].metric,
        "newcomers": len({one.newcomer for one in found}),
        "summary": summary(found),
        "curves": curves,
    }


def write(out: Path, found: list[Adapted], told: dict[str, Any]) -> None:
    from befit.core.storage import atomic_write, write_json
    from befit.studies.adapt_report import adaptation_csv, adaptation_page, adaptation_png

    rows, metric = told["summary"], told["metric"]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "adapt.json", told)
    atomic_write(out / "adapt.csv", adaptation_csv(found).encode())
    atomic_write(out / "adapt.html", adaptation_page(rows, metric, told["newcomers"]).encode())
    atomic_write(out / "adapt.png", adaptation_png(rows, metric))


def show(told: dict[str, Any]) -> None:
    from befit.studies.adapt_report import adaptation_table, without

    console, metric = screen(), told["metric"]
    show_table(console, adaptation_table(told["summary"], metric))
    for sentence in without(told["summary"]):
        console.print(sentence, markup=False, soft_wrap=True)
