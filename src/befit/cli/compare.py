"""`befit compare`: methods over seeds from a study or a configuration, with tables and plots. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from befit.cli.output import (
    Imports,
    Json,
    Quiet,
    Trial,
    each_once,
    each_warning,
    messages,
    names_in,
    only_json,
    print_json,
    print_warning,
    remember_config,
    say,
    screen,
    show_table,
    show_written,
    training,
)
from befit.core.errors import ConfigError
from befit.report.numbers import ranges_text
from befit.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from befit.studies.compare.comparison import Compared
    from befit.studies.compare.plan import Plan


def compare(
    source: Annotated[
        Path,
        typer.Argument(metavar="STUDY|CONFIG", callback=remember_config, help="A study, or a configuration, in YAML."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to all its runs, such as train.lr=3e-4.",
            callback=each_once,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="NAME,NAME,...",
            help="Methods to run; of a study, its runs of these beside the reference. Default: a configuration's own "
            "and its baselines; all of a study.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,...", help="Seeds to repeat for, such as 0,1,2 or 0-9.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes that run side by side.")] = 1,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="RUN",
            help="Run that all others are compared with. Default: local, or the first run where there is none.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder; finished runs in it are reused. Default: runs/NAME."),
    ] = None,
    cells: Annotated[
        list[Path] | None,
        typer.Option(
            "--cells",
            metavar="FILE",
            help="Runs finished elsewhere: the cells.jsonl of another comparison, or cells.jsonl.gz; repeatable.",
        ),
    ] = None,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose", help="Choose the settings of a study on validation examples, and keep them beside it."
        ),
    ] = False,
    early_stop: Annotated[
        bool,
        typer.Option("--early-stop", help="With --choose: candidates that are shown to have lost get no more seeds."),
    ] = False,
    trial: Trial = False,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over seeds: tables with spread and tests, plots, LaTeX.

    The same command again continues where it stopped, even after a crash: finished runs in DIR/runs are kept.
    """
    from befit.config.overrides import parse_seeds
    from befit.studies.compare.progress import CompareProgress

    if choose:
        others = {
            "KEY=VALUE": overrides,
            "--methods": methods,
            "--seeds": seeds,
            "--reference": reference,
            "--cells": cells,
            "--trial": trial,
        }
        if given := [option for option, value in others.items() if value]:
            problem = f"{given[0]}: does not go with --choose, which takes everything from the study; change it there"
            raise ConfigError([problem], "the command")
        _choose(source, jobs, out, early_stop, imports, as_json, quiet)
        return
    if early_stop:
        problem = "--early-stop: belongs to --choose; what is reported is of all its seeds, see docs/protocol.md"
        raise ConfigError([problem], "the command")

    with training(as_json, quiet, lambda: "the same command continues where it stopped") as console:
        from befit.studies.compare.comparison import compare as run_comparison
        from befit.studies.compare.comparison import make_plan

        plan = make_plan(
            source,
            methods=names_in(methods),
            seeds=parse_seeds(seeds),
            overrides=overrides or (),
            reference=reference,
            trial=trial,
            plugins=imports or (),
        )
        with CompareProgress(console, plan, jobs=jobs, quiet=quiet) as progress:
            done = run_comparison(plan, jobs=jobs, out=out, cells=cells or (), observer=progress)
    if as_json:
        print_json({"path": str(done.path), "results": done.results, "failures": [*map(vars, done.failures)]})
    else:
        _show(plan, done)
    _tell_failures(done, len(plan.cells), console)


def _tell_failures(done: Compared, cells: int, console: Console) -> None:
    """Say what failed, if anything did, and leave with 1."""
    for failure in done.failures:
        say(f"{failure.label}, seed {failure.seed}: {failure.error}", "red", console)
    if done.failures:
        text = f"{len(done.failures)} of {cells} runs failed; the same command tries them again"
        if done.results is None and (done.path / "compare.json").exists():
            text += f". The tables in {done.path} are of an earlier comparison"
        say(text, "red", console)
        raise typer.Exit(1)


def _choose(
    source: Path,
    jobs: int,
    out: Path | None,
    early_stop: bool,
    imports: Sequence[str] | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """`befit compare STUDY --choose`."""
    from befit.studies.compare.progress import CompareProgress

    with training(as_json, quiet, lambda: "the same command continues where it stopped") as console:
        from befit.studies.compare.comparison import choose as run_choice
        from befit.studies.compare.comparison import make_choice

        choice = make_choice(source, imports or ())
        with CompareProgress(console, choice.plan, jobs=jobs, quiet=quiet) as progress:
            done = run_choice(choice, jobs=jobs, out=out, early_stop=early_stop, observer=progress)
    if as_json:
        path = done.path and str(done.path)
        print_json({"path": path, "settings": done.settings, "stopped": dict(done.stopped)})
    elif done.path is not None:
        from befit.core.schema import show
        from befit.studies.compare.choice import stop_text

        note = stop_text("", done.stopped).strip()
        rows = [
            [label, ", ".join(f"{k}: {show(v)}" for k, v in settings.items())]
            for label, settings in done.settings.items()
        ]
        show_table(screen(), Table("Chosen on validation examples", ["run", "settings"], rows, note), wrap=1)
        show_written([("settings", done.path), ("every candidate", done.compared.path / "compare.html")])
    if done.path is None:
        _tell_failures(done.compared, len(choice.plan.cells), console)
    for failure in done.compared.failures if done.path is not None else ():
        say(f"{failure.label}, seed {failure.seed}: training diverged, so it was not chosen", "yellow", console)


def check_study(study: Path, overrides: Sequence[str], imports: Sequence[str], data: bool, as_json: bool) -> None:
    """`befit check` for a study."""
    logged: list[str] = []
    with only_json(as_json), each_warning(logged.append):
        from befit.studies.compare.check import check_plan
        from befit.studies.compare.choice import waits
        from befit.studies.compare.comparison import make_choice, make_plan
        from befit.studies.compare.study import read_study

        open_choice = waits(read_study(study, imports))
        plan = (
            make_choice(study, imports).plan if open_choice else make_plan(study, overrides=overrides, plugins=imports)
        )
        result = check_plan(plan, data)
    result["warnings"] = list(dict.fromkeys([*logged, *result["warnings"]]))
    if as_json:
        print_json(result)
        return
    console = screen()
    console.print(f"{study}: no mistakes", style="green", markup=False)
    if open_choice:
        say(f"Settings have still to be chosen, by befit compare {study} --choose; these are the candidates.")
    if not data:
        console.print("Data and models were not looked at.", style="dim")
    console.print()
    rows = [
        (run["run"], run["method"]["name"], "reference" if run["run"] == result["reference"] else "")
        for run in result["runs"]
    ]
    show_table(console, Table(result["title"], ["run", "method", ""], rows))
    for cell in result["left_out"]:
        where = ", ".join((*cell["row"], *cell["column"]))
        say(f"left out of {cell['table']}: {where}: {cell['because']}")
    console.print()
    console.print(
        f"{len(result['runs'])} runs with seeds {ranges_text(result['seeds'])}: {result['cells']} cells", markup=False
    )
    for warning in result["warnings"]:
        print_warning(messages(), warning)


def _show(plan: Plan, done: Compared) -> None:
    if done.results is None:
        return
    from befit.studies.compare.tables import all_tables

    console = screen()
    for table in all_tables(done.results):
        if not table.detail:
            console.print()
            show_table(console, table)
    console.print()
    for sentence in done.results["sentences"]:
        console.print(sentence, markup=False)
    files = {
        "page with plots": "compare.html",
        "as text": "compare.md",
        "for LaTeX": "compare.tex",
        "every client's score": "compare.csv",
        "all of it": "compare.json",
        **({"wins by group": "compare-wins.csv"} if done.results["wins"] else {}),
        "for --cells elsewhere": "cells.jsonl",
        **({"runs with adapters": "runs"} if (done.path / "runs").exists() else {}),
    }
    show_written([(what, done.path / name) for what, name in files.items()])
